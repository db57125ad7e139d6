// Training on a device against training on the host, on the fake device: the same numbers, no race between streams, and
// no step in which the host waits.
#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "tests/parity/device_cases.h"
#include "trireme/base/error.h"

namespace trireme::on_devices {
namespace {

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

TEST(Device, UpdatesInTheWeightsOwn16BitsAsTheHostDoes) {
  for (const ModelCase& model : kModels)
    for (int stage = 0; stage <= 3; ++stage)
      for (const double offload_ratio : {0.0, 0.5, 1.0}) {
        SCOPED_TRACE(str(model.name, ", stage ", stage, ", offloaded ", offload_ratio));
        const auto low = [&](Config& config) {
          config.precision.accumulation_dtype = config.precision.update_dtype = at::kBFloat16;
          config.pager.offload_ratio = stage == 0 ? 0 : offload_ratio;
        };
        const Outcome host = train(model, config_of(stage, at::kBFloat16, low), Place::kHost);
        FakeRecord record;
        const Outcome device = train(model, config_of(stage, at::kBFloat16, low), Place::kOneDevice);
        expect_same(device, host, at::kBFloat16);
        EXPECT_EQ(record.races(), std::vector<std::string>());
        if (model.name == "Llama") continue;  // its own operators round otherwise there
        for (const auto& [name, tensor] : host.tensors) EXPECT_TRUE(at::equal(device.tensors.at(name), tensor)) << name;
      }
}

TEST(Device, RoundsWeightsInTheSamePassAsAdam) {
  FakeRecord record;
  (void)train(kModels[1], config_of(1, at::kBFloat16, {}), Place::kOneDevice);
  int passes = 0;
  for (const FakeOperation& operation : record.operations()) {
    passes += operation.name == "trireme::adam_";
    EXPECT_NE(operation.name, "aten::_fused_adamw_");
    EXPECT_NE(operation.name, "aten::_foreach_copy_");
  }
  EXPECT_EQ(passes, kSteps);
}

TEST(Device, AloneInTheDeterministicOrderItLearnsWhatTheHostLearns) {
  for (int stage = 0; stage < 4; ++stage) {
    const Config config = config_of(stage, at::kFloat, [](Config& c) { c.pager.deterministic = true; });
    FakeRecord record;
    expect_same(train(kModels[1], config, Place::kOneDevice), train(kModels[1], config, Place::kHost), at::kFloat);
    EXPECT_EQ(record.races(), std::vector<std::string>());
  }
}

TEST(Device, RecomputesWhatTheHostDoes) {
  for (const RecomputeMode mode : {RecomputeMode::kFull, RecomputeMode::kSelective})
    for (const bool autocast : {false, true}) {
      const Config config = config_of(3, at::kFloat, [&](Config& c) {
        c.recompute.mode = mode;
        c.precision.autocast.enabled = autocast;
      });
      FakeRecord record;
      const Outcome plain =
          train(kModels[1], config_of(3, at::kFloat, [&](Config& c) { c.precision.autocast.enabled = autocast; }),
                Place::kOneDevice);
      const Outcome device = train(kModels[1], config, Place::kOneDevice);
      EXPECT_EQ(device.losses, plain.losses);
      EXPECT_EQ(device.norms, plain.norms);
      EXPECT_EQ(record.races(), std::vector<std::string>());
    }
}

void warm_up(Config& config) {
  config.scheduler = LrScheduleOptions{.kind = LrScheduleKind::kWarmup, .warmup_num_steps = 4};
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
