// Training on a GPU against training on the host. What the fake device cannot show: the kernels, the allocator, the
// driver.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"
#include "trireme/device/device.h"
#include "trireme/engine/engine.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int kSteps = 8;

struct Losses {
  std::vector<double> losses, norms;
};

Losses take_steps(Engine& engine, TrainedModel& model, int steps) {
  Losses result;
  for (int step = 0; step < steps; ++step) {
    const at::Tensor loss = model.loss({step, step});
    engine.backward(loss);
    engine.step();
    result.losses.push_back(loss.item<double>());
    result.norms.push_back(engine.get_global_grad_norm().value());
  }
  return result;
}

Losses train(const char* device_name, int stage, at::ScalarType dtype, const PagerPolicy& offload = {}) {
  Losses result;
  run_ranks(1, [&](Rank& rank) {
    at::set_num_threads(1);
    TrainedModel model = make_llama();
    model.module->to(choose_device(device_name, 0));
    Config config = default_config(1);
    config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 2e-3, .weight_decay = 0.05};
    config.precision.weight_dtype = dtype;
    config.gradient_clipping = 0.5;
    config.pager.stage = stage;
    config.pager.offload_ratio = offload.offload_ratio;
    config.pager.offload_parameters = offload.offload_parameters;
    Engine engine(rank.world(), *model.module, {.config = config});
    result = take_steps(engine, model, kSteps);
  });
  return result;
}

class Gpu : public ::testing::TestWithParam<std::tuple<int, at::ScalarType>> {};

TEST_P(Gpu, LearnsWhatTheHostLearns) {
  if (count_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  const auto& [stage, dtype] = GetParam();
  (void)choose_device("cuda", 0);  // before the first backward, which settles what libtorch knows
  const Losses host = train("cpu", stage, dtype), gpu = train("cuda", stage, dtype);
  // Products of a GPU add in another order; in bf16 the last of 8 bits may differ.
  const double tolerance = dtype == at::kFloat ? 1e-4 : 3e-2;
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(gpu.losses[step], host.losses[step], tolerance * std::abs(host.losses[step])) << step;
    EXPECT_NEAR(gpu.norms[step], host.norms[step], tolerance * std::abs(host.norms[step])) << step;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Stages, Gpu, ::testing::Combine(::testing::Values(0, 1, 2, 3), ::testing::Values(at::kFloat, at::kBFloat16)),
    [](const auto& info) {
      return "Stage" + std::to_string(std::get<0>(info.param)) + c10::toString(std::get<1>(info.param));
    });

class GpuOffload : public ::testing::TestWithParam<std::tuple<bool, at::ScalarType>> {};

TEST_P(GpuOffload, LearnsWhatTheHostLearns) {
  if (count_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  const auto& [parameters, dtype] = GetParam();
  (void)choose_device("cuda", 0);
  PagerPolicy offload;
  offload.offload_ratio = 1;
  offload.offload_parameters = parameters;
  const Losses host = train("cpu", 3, dtype), gpu = train("cuda", 3, dtype, offload);
  const double tolerance = dtype == at::kFloat ? 1e-4 : 3e-2;
  for (int step = 0; step < kSteps; ++step) {
    EXPECT_NEAR(gpu.losses[step], host.losses[step], tolerance * std::abs(host.losses[step])) << step;
    EXPECT_NEAR(gpu.norms[step], host.norms[step], tolerance * std::abs(host.norms[step])) << step;
  }
}

INSTANTIATE_TEST_SUITE_P(What, GpuOffload,
                         ::testing::Combine(::testing::Bool(), ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) ? "Parameters" : "Optimizer") +
                                  c10::toString(std::get<1>(info.param));
                         });

/// Losses and norms of a run in which all ranks have the same batches, so that any number of them learns alike.
Losses train_alike(Group& group, c10::Device device, int stage, int steps) {
  TrainedModel model = make_llama();
  model.module->to(device);
  Config config = default_config(group.size());
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 2e-3};
  config.pager.stage = stage;
  Engine engine(group, *model.module, {.config = config});
  return take_steps(engine, model, steps);
}

/// On one GPU, over CUDA IPC: the same bits at every stage, and what one rank learns.
int compare_stages(Group& world, const std::string&) {
  const c10::Device device = choose_device("cuda:0", world.rank());
  std::vector<std::vector<int>> each;
  for (int rank = 0; rank < world.size(); ++rank) each.push_back({rank});
  const auto alone = world.split(each, "alone");
  const Losses one = train_alike(*alone, device, 3, kSteps), first = train_alike(world, device, 0, kSteps);
  int differences = 0;
  for (int step = 0; step < kSteps; ++step)
    differences += std::abs(first.losses[step] - one.losses[step]) > 1e-5 * std::abs(one.losses[step]);
  for (int stage = 1; stage < 4; ++stage) {
    const Losses other = train_alike(world, device, stage, kSteps);
    differences += other.losses != first.losses || other.norms != first.norms;
  }
  if (differences > 0) std::fprintf(stderr, "%d runs or steps differ\n", differences);
  return differences;
}

TEST(GpuRanks, HaveTheSameBitsAtEveryStageAndLearnWhatOneDoes) {
  if (count_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  for (const int ranks : {2, 4})
    for (const ProcessResult& result : run_processes(ranks, compare_stages, {}))
      EXPECT_EQ(result.exit_code, 0) << result.error_text;
}

/// Buffers that change hands between streams: gathered units at ZeRO stage 3.
int watch_memory(Group& world, const std::string&) {
  const c10::Device device = choose_device("cuda:0", world.rank());
  (void)train_alike(world, device, 3, 10);
  const int64_t early = device_memory(device).peak_bytes;
  (void)train_alike(world, device, 3, 300);
  const int64_t late = device_memory(device).peak_bytes;
  if (late > early) std::fprintf(stderr, "%lld bytes, and then %lld\n", (long long)early, (long long)late);
  return early > 0 && late <= early ? 0 : 1;
}

TEST(GpuRanks, NeedNoMoreMemoryAfterManySteps) {
  if (count_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  for (const ProcessResult& result : run_processes(2, watch_memory, {}))
    EXPECT_EQ(result.exit_code, 0) << result.error_text;
}

// A cached block that is kept for another stream would make a long run grow.
TEST(GpuMemory, IsTheSameAfterManySteps) {
  if (count_gpus() == 0) GTEST_SKIP() << "there is no GPU";
  run_ranks(1, [&](Rank& rank) {
    const c10::Device device = choose_device("cuda", 0);
    TrainedModel model = make_llama();
    model.module->to(device);
    Config config = default_config(1);
    config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 1e-3};
    config.precision.weight_dtype = at::kBFloat16;
    config.pager.stage = 3;
    Engine engine(rank.world(), *model.module, {.config = config});
    const auto peak_of = [&](int steps) {
      reset_device_peak(device);
      for (int step = 0; step < steps; ++step) {
        engine.backward(model.loss({step, step}));
        engine.step();
      }
      return device_memory(device).peak_bytes;
    };
    const int64_t early = peak_of(10);
    EXPECT_GT(early, 0);
    EXPECT_EQ(peak_of(300), early);
  });
}

}  // namespace
}  // namespace trireme
