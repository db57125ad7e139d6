// Training with buffers that are registered with NCCL: the same bits, and what it moves it moves in place.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "tests/parity/device_cases.h"

namespace trireme::on_devices {
namespace {

constexpr int kRanks = 2;
constexpr int kSteadySteps = 4;

struct Registered {
  std::string name;
  int stage;
  at::ScalarType dtype;
  Configure configure;
  Place place = Place::kNcclFast;
};

class RegisteredBuffers : public ::testing::TestWithParam<std::tuple<ModelCase, Registered>> {};

TEST_P(RegisteredBuffers, LearnTheSameBits) {
  const auto& [model_case, registered] = GetParam();
  Config config = config_of(registered.stage, registered.dtype, registered.configure, kRanks);
  const Outcome plain = train(model_case, config, registered.place, kRanks);
  config.pager.register_buffers = true;
  const int64_t before = fake_nccl_memory().all_registrations;
  FakeRecord record;
  const Outcome outcome = train(model_case, config, registered.place, kRanks);
  EXPECT_EQ(record.races(), std::vector<std::string>());
  EXPECT_EQ(record.recorded_streams(), 0);
  EXPECT_GT(fake_nccl_memory().all_registrations, before);
  EXPECT_EQ(fake_nccl_memory().registrations, 0);
  EXPECT_EQ(outcome.losses, plain.losses);
  EXPECT_EQ(outcome.norms, plain.norms);
  EXPECT_EQ(outcome.offloaded_bytes, plain.offloaded_bytes);
  for (const auto& [name, tensor] : plain.tensors) EXPECT_TRUE(outcome.tensors.at(name).equal(tensor)) << name;
}

void accumulate(Config& config) { config.batch = {8, 2, 2}; }
void talk_in_16_bit(Config& config) { config.precision.communication_dtype = at::kBFloat16; }
void autocast(Config& config) { config.precision.autocast.enabled = true; }
void divide_before(Config& config) { config.pager.predivide_factor = 4; }
void offload_half(Config& config) { config.pager.offload_ratio = 0.5; }
void offload_all(Config& config) {
  config.pager.offload_ratio = 1;
  config.pager.offload_parameters = config.pager.stage == 3;
}
void in_order(Config& config) { config.pager.deterministic = true; }

std::vector<Registered> all_cases() {
  std::vector<Registered> cases;
  for (int stage = 0; stage < 4; ++stage) {
    const std::string at_stage = "Stage" + std::to_string(stage);
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
      cases.push_back({at_stage + c10::toString(dtype), stage, dtype, {}});
    cases.push_back({at_stage + "Accumulating", stage, at::kFloat, accumulate});
    cases.push_back({at_stage + "TalkingIn16Bit", stage, at::kFloat, talk_in_16_bit});
    cases.push_back({at_stage + "Autocast", stage, at::kFloat, autocast});
    cases.push_back({at_stage + "Dividing", stage, at::kBFloat16, divide_before});
    cases.push_back({at_stage + "Half", stage, at::kHalf, {}});
    if (stage > 0) cases.push_back({at_stage + "FoldedHere", stage, at::kFloat, {}, Place::kNccl});
    // ZeRO stage 0 exchanges gradients alone, and in order they are not registered.
    if (stage > 0) cases.push_back({at_stage + "InOrder", stage, at::kFloat, in_order});
    if (stage > 0) cases.push_back({at_stage + "HalfOffloaded", stage, at::kFloat, offload_half});
    if (stage > 0) cases.push_back({at_stage + "Offloaded", stage, at::kFloat, offload_all});
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Stages, RegisteredBuffers,
                         ::testing::Combine(::testing::Values(kModels[1], kModels[2]),
                                            ::testing::ValuesIn(all_cases())),
                         [](const auto& info) { return std::get<0>(info.param).name + std::get<1>(info.param).name; });

/// NCCL's calls in the backward passes after the second, on all ranks.
struct Steady {
  FakeNcclMemory memory;
  int64_t registrations = 0;
  int64_t host_waits = 0;
};

Steady steady_steps(const ModelCase& model_case, const Config& config) {
  Steady steady;
  FakeRecord record;
  run_ranks(kRanks, [&](Rank& rank) {
    at::set_num_threads(1);
    TrainedModel model = model_case.make();
    move_to_fake(*model.module, fake_device(rank.id()));
    const auto group = make_fake_nccl_group(rank.world(), fake_device(rank.id()));
    Engine engine(*group, *model.module, {.config = config});
    const auto step = [&](int i) {
      engine.backward(model.loss({i, i + rank.id()}));
      engine.step();
    };
    for (int i = 0; i < 2; ++i) step(i);
    rank.world().barrier();
    const FakeNcclMemory before = fake_nccl_memory();
    const int64_t waits_before = record.host_waits();
    rank.world().barrier();
    for (int i = 2; i < 2 + kSteadySteps; ++i) step(i);
    rank.world().barrier();
    if (rank.id() == 0) {
      const FakeNcclMemory after = fake_nccl_memory();
      EXPECT_EQ(engine.pager().memory().registered_bytes, after.registered_bytes / kRanks);
      steady.host_waits = record.host_waits() - waits_before;
      steady.registrations = after.all_registrations - before.all_registrations;
      steady.memory.moved_in_place = after.moved_in_place - before.moved_in_place;
      steady.memory.copied = after.copied - before.copied;
    }
    rank.world().barrier();
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
  return steady;
}

/// Stage, dtype, and bytes of units that may be whole besides the two largest.
class SteadyStep : public ::testing::TestWithParam<std::tuple<int, at::ScalarType, int64_t>> {};

TEST_P(SteadyStep, MovesWeightsAndGradientsInPlaceAndRegistersNothing) {
  const auto& [stage, dtype, live_bytes] = GetParam();
  Config config = config_of(
      stage, dtype,
      [&](Config& c) {
        c.pager.poison = false;
        c.pager.live_bytes = live_bytes;
      },
      kRanks);
  config.precision.accumulation_dtype = dtype;
  const Steady plain = steady_steps(kModels[1], config);
  EXPECT_EQ(plain.memory.moved_in_place, 0);
  config.pager.register_buffers = true;
  const Steady steady = steady_steps(kModels[1], config);
  EXPECT_EQ(steady.registrations, 0);
  EXPECT_EQ(steady.host_waits, plain.host_waits);
  EXPECT_GT(steady.memory.moved_in_place, 0);
  const int64_t norms = kRanks * kSteadySteps;  // a few numbers, of each step
  EXPECT_EQ(steady.memory.copied, norms);
  EXPECT_EQ(steady.memory.moved_in_place, plain.memory.copied - norms);
}

INSTANTIATE_TEST_SUITE_P(Stages, SteadyStep,
                         ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(at::kFloat, at::kBFloat16),
                                            ::testing::Values(0, 1 << 20)),
                         [](const auto& info) {
                           return "Stage" + std::to_string(std::get<0>(info.param)) +
                                  c10::toString(std::get<1>(info.param)) +
                                  (std::get<2>(info.param) > 0 ? "" : "WithLittleRoom");
                         });

// CUDA IPC registers no memory, so no buffer is registered there.
TEST(RegisteredBuffers, ThatCudaIpcDoesNotHaveAreNotTaken) {
  run_ranks(kRanks, [](Rank& rank) {
    at::set_num_threads(1);
    TrainedModel model = make_llama();
    move_to_fake(*model.module, fake_device(rank.id()));
    const auto group = make_group(rank, Place::kIpc);
    Engine engine(*group, *model.module,
                  {.config = config_of(
                       3, at::kFloat, [](Config& c) { c.pager.register_buffers = true; }, kRanks)});
    EXPECT_EQ(engine.pager().memory().registered_bytes, 0);
  });
}

// The slab goes with the engine; what was whole stays readable.
TEST(RegisteredBuffers, GoWithTheEngine) {
  FakeRecord record;
  run_ranks(kRanks, [&](Rank& rank) {
    at::set_num_threads(1);
    TrainedModel model = make_llama();
    move_to_fake(*model.module, fake_device(rank.id()));
    const auto group = make_group(rank, Place::kNcclFast);
    const Config config = config_of(
        3, at::kFloat, [](Config& c) { c.pager.register_buffers = true; }, kRanks);
    int64_t with_engine = 0;
    at::Tensor before;
    {
      Engine engine(*group, *model.module, {.config = config});
      before = model.module->parameters()[0].cpu();
      with_engine = engine.pager().memory().registered_bytes;
    }
    EXPECT_TRUE(model.module->parameters()[0].cpu().equal(before));
    rank.world().barrier();
    EXPECT_GT(with_engine, 0);
    const int64_t idle = record.bytes(rank.id());
    const at::Tensor next = group->buffer_registration(fake_device(rank.id()))->zeros(512);
    EXPECT_LT(record.bytes(rank.id()), idle - with_engine / 4);
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(SteadyStep, MovesEveryMicroStepsGradientsInPlace) {
  for (int stage = 0; stage < 4; ++stage)
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      Config config = config_of(stage, dtype, accumulate, kRanks);
      config.precision.accumulation_dtype = dtype;
      config.pager.live_bytes = 1 << 20;
      if (stage < 2) talk_in_16_bit(config);
      config.pager.register_buffers = true;
      const Steady steady = steady_steps(kModels[1], config);
      // Sums in fp32 of what travelled in 16 bit are made here, and not by NCCL.
      EXPECT_GT(steady.memory.moved_in_place, 0);
      EXPECT_EQ(steady.memory.copied, kRanks * kSteadySteps / 2) << stage << " " << dtype;
    }
}

}  // namespace
}  // namespace trireme::on_devices
