// Training on a device against training on the host, on the fake device: the same numbers, no race between streams, and
// no step in which the host waits.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/fake_device/fake_cuda.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/run_ranks.h"
#include "trireme/engine/engine.h"

namespace trireme::on_devices {
namespace {

using namespace testing;

constexpr int kSteps = 6;

/// How a run is configured, over config_of()'s defaults.
using Configure = std::function<void(Config&)>;

Config config_of(int stage, at::ScalarType dtype, const Configure& configure, int ranks = 1) {
  Config config = default_config(ranks);
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 2e-3, .weight_decay = 0.05};
  config.precision.weight_dtype = dtype;
  config.gradient_clipping = 0.5;
  config.pager = harsh_policy({"", stage, GatherPolicy::kAuto});
  if (configure) configure(config);
  return config;
}

struct Outcome {
  std::vector<double> losses, norms, rates, scales;
  int64_t skipped_steps = 0;
  std::map<std::string, at::Tensor> tensors;
};

/// Multiplies a loss, by step.
using Disturb = std::function<double(int)>;

enum class Place { kHost, kOneDevice, kNccl, kIpc };

// Rank r has fake device r.
std::unique_ptr<Group> make_group(Rank& rank, Place place) {
  const c10::Device device = fake_device(rank.id());
  if (place == Place::kNccl)
    return make_fake_nccl_group(rank.world(), device, {.sums = NcclGroupOptions::Sums::kInRankOrder});
  return place == Place::kIpc ? make_fake_cuda_ipc_group(rank.world(), device) : nullptr;
}

/// Rank 0's losses, and what all ranks have alike.
Outcome train(const ModelCase& model_case, const Config& config, Place place, int ranks = 1,
              const Disturb& disturb = {}) {
  Outcome outcome;
  run_ranks(ranks, [&](Rank& rank) {
    at::set_num_threads(1);
    TrainedModel model = model_case.make();
    if (place != Place::kHost) move_to_fake(*model.module, fake_device(rank.id()));
    const std::unique_ptr<Group> group = make_group(rank, place);
    Engine engine(group ? *group : rank.world(), *model.module, {.config = config});
    const bool records = rank.id() == 0;
    for (int step = 0; step < kSteps; ++step) {
      at::Tensor loss = model.loss({step * rank.size() + rank.id(), step});
      if (disturb) loss = loss * disturb(step);
      engine.backward(loss);
      engine.step();
      if (records) outcome.losses.push_back(loss.item<double>());
      if (records) outcome.norms.push_back(engine.get_global_grad_norm().value());
      if (records) outcome.rates.push_back(engine.get_lr());
      if (records) outcome.scales.push_back(engine.loss_scale());
    }
    if (records) outcome.skipped_steps = engine.skipped_steps();
    engine.destroy();
    if (records)
      for (const auto& [name, tensor] : parameters_of(*model.module)) outcome.tensors[name] = tensor.cpu();
  });
  return outcome;
}

void expect_close(const std::vector<double>& actual, const std::vector<double>& expected, double tolerance,
                  const char* what) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i)
    EXPECT_NEAR(actual[i], expected[i], tolerance * std::max(1.0, std::abs(expected[i]))) << what << ", step " << i;
}

void expect_same(const Outcome& device, const Outcome& host, at::ScalarType dtype) {
  // In 16 bit the last bit of a master decides now and then how a weight is rounded.
  const double tolerance = dtype == at::kFloat ? 1e-5 : 2e-2;
  expect_close(device.losses, host.losses, tolerance, "loss");
  expect_close(device.norms, host.norms, tolerance, "norm");
  expect_close(device.rates, host.rates, 1e-6, "lr");
  EXPECT_EQ(device.scales, host.scales);
  EXPECT_EQ(device.skipped_steps, host.skipped_steps);
  for (const auto& [name, tensor] : host.tensors)
    EXPECT_TRUE(device.tensors.at(name).allclose(tensor, tolerance, tolerance)) << name;
}

const std::vector<ModelCase> kModels = {{"Mlp", make_mlp}, {"Llama", make_llama}, {"TiedNet", make_tied_net}};

class OneDevice : public ::testing::TestWithParam<std::tuple<ModelCase, int, at::ScalarType>> {};

TEST_P(OneDevice, LearnsWhatTheHostLearns) {
  const auto& [model_case, stage, dtype] = GetParam();
  const Config config = config_of(stage, dtype, {});
  const Outcome host = train(model_case, config, Place::kHost);
  FakeRecord record;
  const Outcome device = train(model_case, config, Place::kOneDevice);
  expect_same(device, host, dtype);
  EXPECT_EQ(record.races(), std::vector<std::string>());
  EXPECT_EQ(record.recorded_streams(), 0);
}

INSTANTIATE_TEST_SUITE_P(Stages, OneDevice,
                         ::testing::Combine(::testing::ValuesIn(kModels), ::testing::Values(0, 1, 2, 3),
                                            ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "Stage" + std::to_string(std::get<1>(info.param)) +
                                  c10::toString(std::get<2>(info.param));
                         });

struct Ranks {
  const char* name;
  Place place;
  int ranks;
};

class SeveralDevices : public ::testing::TestWithParam<std::tuple<ModelCase, Ranks, at::ScalarType>> {};

TEST_P(SeveralDevices, LearnTheSameBitsAtEveryStageAndWhatTheHostLearns) {
  if (!kHasFakeNccl) GTEST_SKIP() << "built without NCCL's headers";
  const auto& [model_case, ranks, dtype] = GetParam();
  const Outcome host = train(model_case, config_of(1, dtype, {}, ranks.ranks), Place::kHost, ranks.ranks);
  std::optional<Outcome> first;
  for (int stage = 0; stage < 4; ++stage) {
    FakeRecord record;
    const Outcome device = train(model_case, config_of(stage, dtype, {}, ranks.ranks), ranks.place, ranks.ranks);
    EXPECT_EQ(record.races(), std::vector<std::string>()) << "stage " << stage;
    EXPECT_EQ(record.recorded_streams(), 0);
    expect_same(device, host, dtype);
    if (!first) first = device;
    EXPECT_EQ(device.losses, first->losses) << "stage " << stage;
    EXPECT_EQ(device.norms, first->norms) << "stage " << stage;
    for (const auto& [name, tensor] : first->tensors)
      EXPECT_TRUE(device.tensors.at(name).equal(tensor)) << name << ", stage " << stage;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, SeveralDevices,
                         ::testing::Combine(::testing::Values(kModels[1], kModels[2]),
                                            ::testing::Values(Ranks{"2Nccl", Place::kNccl, 2},
                                                              Ranks{"4Nccl", Place::kNccl, 4},
                                                              Ranks{"2Ipc", Place::kIpc, 2}),
                                            ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + std::get<1>(info.param).name +
                                  c10::toString(std::get<2>(info.param));
                         });

class DeviceOptimizer : public ::testing::TestWithParam<OptimizerKind> {};

TEST_P(DeviceOptimizer, UpdatesAsTheHostDoes) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const Config config = config_of(1, dtype, [](Config& c) {
      c.optimizer = OptimizerOptions{.kind = GetParam(), .lr = 2e-3, .weight_decay = 0.05, .momentum = 0.9};
    });
    FakeRecord record;
    expect_same(train(kModels[1], config, Place::kOneDevice), train(kModels[1], config, Place::kHost), dtype);
    EXPECT_EQ(record.races(), std::vector<std::string>());
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceOptimizer,
                         ::testing::Values(OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kAdagrad,
                                           OptimizerKind::kLion, OptimizerKind::kMuon, OptimizerKind::kSgd),
                         [](const auto& info) { return std::string(optimizer_name(info.param)); });

void warm_up(Config& config) {
  config.scheduler = ScheduleOptions{.kind = ScheduleKind::kWarmup, .warmup_num_steps = 4};
}

TEST(Device, SkipsAndFollowsTheScheduleAsTheHostDoes) {
  const auto overflow = [](int step) { return step == 1 || step == 3 ? std::numeric_limits<double>::infinity() : 1; };
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    const Config config = config_of(2, dtype, [](Config& c) {
      warm_up(c);
      c.precision.loss_scale = {.initial_scale_power = 8, .loss_scale_window = 2, .hysteresis = 1};
    });
    FakeRecord record;
    const Outcome host = train(kModels[0], config, Place::kHost, 1, overflow);
    const Outcome device = train(kModels[0], config, Place::kOneDevice, 1, overflow);
    EXPECT_EQ(host.skipped_steps, 2);
    EXPECT_EQ(device.skipped_steps, 2);
    expect_close(device.rates, host.rates, 1e-6, "lr");
    EXPECT_EQ(device.scales, host.scales);
    EXPECT_EQ(device.norms[1], -1);
    for (const auto& [name, tensor] : host.tensors)
      EXPECT_TRUE(device.tensors.at(name).allclose(tensor, dtype == at::kFloat ? 1e-5 : 1e-2,
                                                   dtype == at::kFloat ? 1e-6 : 1e-3))
          << name;
    EXPECT_EQ(record.races(), std::vector<std::string>());
  }
}

TEST(Device, InASteadyStepTheHostWaitsForNothing) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf})
    for (int stage = 0; stage < 4; ++stage) {
      FakeRecord record;
      run_ranks(1, [&](Rank& rank) {
        auto net = std::make_shared<LlamaImpl>(LlamaOptions{.vocab_size = 13,
                                                            .hidden_size = 16,
                                                            .intermediate_size = 24,
                                                            .num_hidden_layers = 2,
                                                            .num_attention_heads = 2,
                                                            .num_key_value_heads = 1,
                                                            .max_position_embeddings = 16});
        move_to_fake(*net, fake_device());
        Engine engine(rank.world(), *net, {.config = config_of(stage, dtype, warm_up)});
        const at::Tensor tokens = to_device_of(*net, tokens_of({1, 0}, 13, {2, 9}));
        const auto step = [&] {
          engine.backward(net->loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8)));
          engine.step();
        };
        step();
        const int64_t before = record.host_waits();
        for (int i = 0; i < 3; ++i) step();
        EXPECT_EQ(record.host_waits(), before) << dtype << ", stage " << stage;
        EXPECT_GT(engine.get_global_grad_norm().value(), 0);
        EXPECT_GT(record.host_waits(), before);
      });
    }
}

}  // namespace
}  // namespace trireme::on_devices
