// Offloading on the fake device: what is updated on the host learns what the host learns, no copy races with another or
// with the host, and where nothing decides over a step nobody waits but for the weights that it needs.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <limits>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tests/parity/device_cases.h"
#include "tests/support/temporary_folder.h"
#include "trireme/plan/estimate.h"

namespace trireme::on_devices {
namespace {

struct Offloading {
  const char* name;
  double ratio;
  bool parameters;
};

Configure offloading(const Offloading& what, const Configure& more = {}) {
  return [=](Config& config) {
    config.pager.offload_ratio = what.ratio;
    config.pager.offload_parameters = what.parameters;
    if (more) more(config);
  };
}

class OffloadOneDevice : public ::testing::TestWithParam<std::tuple<ModelCase, int, at::ScalarType, Offloading>> {};

TEST_P(OffloadOneDevice, LearnsWhatTheHostLearns) {
  const auto& [model_case, stage, dtype, what] = GetParam();
  const Outcome host = train(model_case, config_of(stage, dtype, {}), Place::kHost);
  for (const double clipping : {0.0, 0.5}) {
    // Without clipping and a look for overflows nothing decides over a step in bf16.
    const auto clip = [&](Config& config) {
      config.gradient_clipping = clipping;
      config.precision.check_grad_overflow = clipping > 0;
    };
    const Outcome on_host = clipping == 0 ? train(model_case, config_of(stage, dtype, clip), Place::kHost) : host;
    FakeRecord record;
    const Outcome device = train(model_case, config_of(stage, dtype, offloading(what, clip)), Place::kOneDevice);
    expect_same(device, on_host, dtype);
    EXPECT_GT(device.offloaded_bytes, 0);
    EXPECT_EQ(record.races(), std::vector<std::string>());
    EXPECT_EQ(record.recorded_streams(), 0);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Stages, OffloadOneDevice,
    ::testing::Combine(::testing::ValuesIn(kModels), ::testing::Values(1, 3),
                       ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                       ::testing::Values(Offloading{"Optimizer", 1, false}, Offloading{"Part", 0.5, false},
                                         Offloading{"Parameters", 1, true}, Offloading{"PartOfParameters", 0.5, true})),
    [](const auto& info) {
      return std::get<0>(info.param).name + "Stage" + std::to_string(std::get<1>(info.param)) +
             c10::toString(std::get<2>(info.param)) + std::get<3>(info.param).name;
    });

class OffloadSeveralDevices : public ::testing::TestWithParam<std::tuple<int, at::ScalarType, Offloading>> {};

TEST_P(OffloadSeveralDevices, LearnWhatTheHostLearns) {
  const auto& [stage, dtype, what] = GetParam();
  for (const Configure& more : {Configure(), Configure([](Config& config) {
                                  config.gradient_clipping = 0;
                                  config.precision.check_grad_overflow = false;
                                })}) {
    const Outcome host = train(kModels[1], config_of(stage, dtype, more, 2), Place::kHost, 2);
    FakeRecord record;
    const Outcome device = train(kModels[1], config_of(stage, dtype, offloading(what, more), 2), Place::kNccl, 2);
    expect_same(device, host, dtype);
    EXPECT_GT(device.offloaded_bytes, 0);
    EXPECT_EQ(record.races(), std::vector<std::string>());
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, OffloadSeveralDevices,
                         ::testing::Combine(::testing::Values(1, 2, 3), ::testing::Values(at::kFloat, at::kBFloat16),
                                            ::testing::Values(Offloading{"Optimizer", 1, false},
                                                              Offloading{"Part", 0.5, false},
                                                              Offloading{"Parameters", 1, true})),
                         [](const auto& info) {
                           return "Stage" + std::to_string(std::get<0>(info.param)) +
                                  c10::toString(std::get<1>(info.param)) + std::get<2>(info.param).name;
                         });

class OffloadOptimizer : public ::testing::TestWithParam<OptimizerKind> {};

TEST_P(OffloadOptimizer, UpdatesAsTheHostDoes) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
    const auto choose = [](Config& c) {
      c.optimizer = OptimizerOptions{.kind = GetParam(), .lr = 2e-3, .weight_decay = 0.05, .momentum = 0.9};
      c.gradient_clipping = 0;  // so that in bf16 the host waits for no norm, with which gradients would arrive
      c.precision.check_grad_overflow = false;
    };
    const Outcome host = train(kModels[1], config_of(2, dtype, choose), Place::kHost);
    FakeRecord record;
    expect_same(train(kModels[1], config_of(2, dtype, offloading({"", 1, false}, choose)), Place::kOneDevice), host,
                dtype);
    EXPECT_EQ(record.races(), std::vector<std::string>());
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, OffloadOptimizer,
                         ::testing::Values(OptimizerKind::kAdam, OptimizerKind::kAdagrad, OptimizerKind::kLion,
                                           OptimizerKind::kLamb, OptimizerKind::kMuon, OptimizerKind::kSgd),
                         [](const auto& info) { return std::string(optimizer_name(info.param)); });

TEST(Offload, MayHaveStatesOnDisk) {
  const TemporaryFolder folder;
  for (const int stage : {1, 3})
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
      for (const double ratio : {1.0, 0.5}) {
        const Outcome host = train(kModels[1], config_of(stage, dtype, {}), Place::kHost);
        const auto to_disk = [&](Config& c) { c.disk = {.folder = folder.path().string(), .block_numel = 4096}; };
        FakeRecord record;
        expect_same(
            train(kModels[1], config_of(stage, dtype, offloading({"", ratio, false}, to_disk)), Place::kOneDevice),
            host, dtype);
        EXPECT_EQ(record.races(), std::vector<std::string>());
      }
}

// Sums of several backward passes are made on the way: what has left comes back and is added to.
TEST(Offload, SumsTheGradientsOfAWindow) {
  for (const bool deterministic : {false, true})
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      const auto accumulate = [&](Config& c) {
        c.batch.gradient_accumulation_steps = 3;
        c.batch.train_batch_size = 3;
        c.pager.deterministic = deterministic;
      };
      const Outcome host = train(kModels[2], config_of(2, dtype, accumulate), Place::kHost);
      FakeRecord record;
      const Config config = config_of(2, dtype, offloading({"", 1, false}, accumulate));
      expect_same(train(kModels[2], config, Place::kOneDevice), host, dtype);
      EXPECT_EQ(record.races(), std::vector<std::string>());
    }
}

TEST(Offload, SkipsAndFollowsTheScheduleAsTheHostDoes) {
  const auto overflow = [](int step) { return step == 1 || step == 3 ? std::numeric_limits<double>::infinity() : 1; };
  for (const at::ScalarType dtype : {at::kFloat, at::kHalf}) {
    const auto warm_up = [](Config& c) {
      c.scheduler = LrScheduleOptions{.kind = LrScheduleKind::kWarmup, .warmup_num_steps = 4};
      c.precision.loss_scale = {.initial_scale_power = 8, .loss_scale_window = 2, .hysteresis = 1};
    };
    const Outcome host = train(kModels[0], config_of(2, dtype, warm_up), Place::kHost, 1, overflow);
    FakeRecord record;
    const Outcome device =
        train(kModels[0], config_of(2, dtype, offloading({"", 1, false}, warm_up)), Place::kOneDevice, 1, overflow);
    EXPECT_EQ(device.skipped_steps, 2);
    expect_close(device.rates, host.rates, 1e-6, "lr");
    EXPECT_EQ(device.scales, host.scales);
    EXPECT_EQ(device.norms[1], -1);
    for (const auto& [name, tensor] : host.tensors)
      EXPECT_TRUE(device.tensors.at(name).allclose(tensor, dtype == at::kFloat ? 1e-5 : 1e-2, 1e-3)) << name;
    EXPECT_EQ(record.races(), std::vector<std::string>());
  }
}

// A unit that one forward did not use may still be being updated when the next gradients of it, zeros, arrive.
TEST(Offload, UnitsThatARoundDoesNotUseAreLeftToTheirUpdate) {
  FakeRecord record;
  const auto undecided = [](Config& config) {
    config.gradient_clipping = 0;
    config.precision.check_grad_overflow = false;
    config.pager.units.merge_below_bytes = 0;
  };
  const Outcome host = train(kModels[2], config_of(2, at::kBFloat16, undecided), Place::kHost);
  for (int round = 0; round < 3; ++round)
    expect_same(
        train(kModels[2], config_of(2, at::kBFloat16, offloading({"", 1, false}, undecided)), Place::kOneDevice), host,
        at::kBFloat16);
}

/// bf16 in which nothing decides whether, or how, a step is applied.
void leave_undecided(Config& config) {
  config.gradient_clipping = 0;
  config.precision.check_grad_overflow = false;
  config.pager.offload_ratio = 1;
}

/// A model of `layers` linear ones, each a unit, trained for `steps`.
void train_layers(int layers, int steps, const Configure& configure,
                  const std::function<void(Engine&, int)>& after_step = {},
                  const std::function<void(const at::Tensor&)>& in_backward = {}) {
  run_ranks(1, [&](Rank& rank) {
    at::set_num_threads(1);
    torch::nn::Sequential net;
    for (int i = 0; i < layers; ++i) net->push_back(torch::nn::Linear(16, 16));
    move_to_fake(*net, fake_device());
    Engine engine(rank.world(), *net, {.config = config_of(2, at::kBFloat16, configure)});
    const at::Tensor input = at::ones({2, 16}, at::TensorOptions().dtype(at::kBFloat16).device(fake_device()));
    for (int step = 0; step < steps; ++step) {
      const at::Tensor output = net->forward(input);
      if (in_backward) output.register_hook(in_backward);
      engine.backward(output.square().mean());
      engine.step();
      if (after_step) after_step(engine, step);
    }
  });
}

// The thread that updates waits for gradients to arrive, beside the program.
TEST(Offload, WhereNothingDecidesTheProgramWaitsForNoDevice) {
  FakeRecord record;
  std::map<std::thread::id, int64_t> before;
  std::thread::id backward;
  train_layers(
      4, 4, leave_undecided,
      [&](Engine&, int step) {
        const std::thread::id program = std::this_thread::get_id();
        for (const std::thread::id thread : {program, backward}) {
          if (step == 0) before[thread] = record.host_waits(thread);
          EXPECT_EQ(record.host_waits(thread), before.at(thread)) << "step " << step;
        }
        EXPECT_TRUE(step == 0 || record.host_waits() > before.at(program)) << "nothing was waited for at all";
      },
      [&](const at::Tensor&) { backward = std::this_thread::get_id(); });
}

TEST(Offload, GradientsLeaveBesideBackwardAndWeightsReturnBesideForward) {
  FakeRecord record;
  train_layers(6, 3, leave_undecided);
  const std::vector<FakeOperation> operations = record.operations();
  const auto is_beside = [](const FakeOperation& a, const FakeOperation& b) {
    return a.stream != b.stream && !runs_after(a, b) && !runs_after(b, a);
  };
  const auto count_beside = [&](const std::string& copy, const std::string& computes) {
    int count = 0;
    for (const FakeOperation& a : operations)
      for (const FakeOperation& b : operations) count += a.name == copy && b.name == computes && is_beside(a, b);
    return count;
  };
  EXPECT_GT(count_beside("copy to host", "aten::mm"), 0);
  EXPECT_GT(count_beside("copy to device", "aten::addmm"), 0);
}

// fp32 masters, moments and gradients are on the host: 2 bytes per weight stay, and gradients on their way.
TEST(Offload, TheDeviceKeepsWeightsAlone) {
  constexpr int64_t kLayers = 40, kUnitBytes = 2 * (16 * 16 + 16 + 16);  // with padding
  for (const bool parameters : {false, true}) {
    FakeRecord record;
    train_layers(
        kLayers, 3,
        [&](Config& config) {
          leave_undecided(config);
          config.pager.stage = 3;
          config.pager.offload_parameters = parameters;
          config.pager.live_bytes = 2 * kUnitBytes;
        },
        [&](Engine& engine, int step) {
          if (step < 2) return;
          engine.pager().release_gathered();
          EXPECT_LE(record.bytes(0), (parameters ? 0 : kLayers * kUnitBytes) + 4096);
        });
  }
}

/// The memory on the device and on the host of each of `ranks`, compared with `trireme estimate`.
void expect_the_estimate(int ranks, int stage, at::ScalarType dtype, double ratio, bool parameters) {
  FakeRecord record;
  run_ranks(ranks, [&](Rank& rank) {
    at::set_num_threads(1);
    const c10::Device device = fake_device(rank.id());
    torch::nn::Sequential net;
    for (int i = 0; i < 6; ++i) net->push_back(torch::nn::Linear(64, 64));
    for (at::Tensor& frozen : net[1]->parameters()) frozen.requires_grad_(false);
    move_to_fake(*net, device);
    const auto group = ranks > 1 ? make_fake_nccl_group(rank.world(), device) : nullptr;
    const Config config = config_of(
        stage, dtype,
        [&](Config& c) {
          leave_undecided(c);
          c.pager.offload_ratio = ratio;
          c.pager.offload_parameters = parameters;
          c.pager.units.merge_below_bytes = 0;
        },
        ranks);
    Engine engine(group ? *group : rank.world(), *net, {.config = config});
    const at::Tensor input = at::ones({2, 64}, at::TensorOptions().dtype(dtype).device(device));
    engine.backward(net->forward(input).square().mean());
    engine.step();
    engine.pager().release_gathered();
    const ModelStates states = estimate_model_states(engine.pager().layout(), {.stage = stage,
                                                                               .world = ranks,
                                                                               .weight_dtype = dtype,
                                                                               .optimizer = *config.optimizer,
                                                                               .offload_ratio = ratio,
                                                                               .offload_parameters = parameters});
    const std::string what =
        str("stage ", stage, ", ratio ", ratio, ", parameters ", parameters, ", ", ranks, " ranks");
    constexpr int64_t kNumbers = 4096;  // norms, step counts, the batch
    EXPECT_GE(record.bytes(rank.id()), states.total()) << what;
    EXPECT_LE(record.bytes(rank.id()), states.total() + kNumbers) << what;
    // The host's memory is page-locked, in blocks of powers of two, but for moments, and masters where weights have 16
    // bits.
    int64_t pinned = states.host_bytes;
    const std::vector<bool> offloaded = offloaded_units(engine.pager().layout(), ratio);
    for (size_t i = 0; i < offloaded.size(); ++i)
      if (offloaded[i]) pinned -= engine.pager().layout().units[i].shard_numel * (dtype == at::kFloat ? 8 : 12);
    EXPECT_GE(engine.pager().memory().offloaded_bytes, pinned) << what;
    EXPECT_LE(engine.pager().memory().offloaded_bytes, 2 * pinned) << what;
  });
}

TEST(Offload, TheEstimateIsWhatIsThere) {
  for (const int ranks : {1, 2}) {
    for (const int stage : {1, 2, 3})
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
        for (const double ratio : {0.0, 0.5, 1.0}) {
          expect_the_estimate(ranks, stage, dtype, ratio, false);
          if (stage == 3 && ratio > 0) expect_the_estimate(ranks, stage, dtype, ratio, true);
        }
  }
}

}  // namespace
}  // namespace trireme::on_devices
