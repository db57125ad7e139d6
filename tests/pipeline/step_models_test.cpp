// Several models that a step function uses, each with an engine of its own over the same stages.
#include <ATen/ops/equal.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/nn/modules.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/pipeline/step_engine.h"

namespace trireme::testing {
namespace step_models {

namespace nn = torch::nn;
using at::Tensor;

constexpr int kMicroBatches = 4;

struct Net : nn::Module {
  nn::Linear first{register_module("first", nn::Linear(6, 8))}, last{register_module("last", nn::Linear(8, 6))};
  Tensor forward(const Tensor& x) { return last(at::tanh(first(x))); }
};

int stage_of(const std::string& name) { return name.starts_with("first") ? 0 : 1; }

InitializeOptions options_of(int stage = 0) {
  Config config;
  config.batch = {.train_batch_size = 3 * kMicroBatches,
                  .train_micro_batch_size_per_gpu = 3,
                  .gradient_accumulation_steps = kMicroBatches};
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 0.01};
  config.pager.stage = stage;
  return {.config = config};
}

std::vector<Tensor> weights_of(StepEngine& engine) {
  std::vector<Tensor> weights;
  for (size_t i = 0; i < engine.pager().parameters().size(); ++i)
    weights.push_back(engine.pager().whole(static_cast<int>(i)).detach().clone());
  return weights;
}

/// Weights of both models that rank 0 has, after steps of which the second one takes every other gradient.
std::vector<Tensor> train(int stages, bool is_run_by_second) {
  std::vector<Tensor> found;
  run_ranks(stages, [&](Rank& rank) {
    manual_seed(3);
    Net one, other;
    StepEngine engine(rank.world(), Topology({{"pipe", stages}, {"data", 1}}), one, stage_of, {}, options_of());
    StepEngine beside(engine, other, stage_of, options_of());
    for (int step = 0; step < 4; ++step) {
      StepEngine& runs = is_run_by_second ? beside : engine;
      (void)runs.step(kMicroBatches, [&](int micro_batch) {
        const Tensor x = at::full({3, 6}, 0.25 * (micro_batch + 1) - 0.125 * step);
        const Tensor loss = at::mse_loss(other.forward(one.forward(x)), x);
        runs.backward(loss);
        return std::vector{loss};
      });
      engine.update();
      step % 2 == 0 ? beside.update() : beside.zero_grad();
    }
    if (rank.id() == 0)
      for (StepEngine* const trained : {&engine, &beside})
        for (const Tensor& weight : weights_of(*trained)) found.push_back(weight);
  });
  return found;
}

TEST(Models, TrainAsOnOneStageByEither) {
  const std::vector<Tensor> expected = train(1, false);
  for (const bool is_run_by_second : {false, true}) {
    const std::vector<Tensor> found = train(2, is_run_by_second);
    ASSERT_EQ(found.size(), 4);  // weight and bias of each model's first layer
    ASSERT_EQ(expected.size(), 8);
    for (int i = 0; i < 4; ++i) EXPECT_TRUE(at::equal(found[i], expected[i < 2 ? i : i + 2])) << i;
  }
}

TEST(Models, OneThatEndsTakesPartNoLonger) {
  run_ranks(2, [&](Rank& rank) {
    Net one, other;
    auto engine = std::make_unique<StepEngine>(rank.world(), Topology({{"pipe", 2}, {"data", 1}}), one, stage_of,
                                               StepRunnerOptions(), options_of());
    StepEngine beside(*engine, other, stage_of, options_of());
    engine.reset();
    const auto outputs = beside.step(1, [&](int) {
      const Tensor loss = other.forward(at::ones({3, 6})).sum();
      beside.backward(loss);
      return std::vector{loss};
    });
    beside.update();
    EXPECT_EQ(outputs.size(), 1);
    EXPECT_EQ(beside.global_steps(), 1);
  });
}

TEST(Models, RefuseShardsOfGradients) {
  run_ranks(4, [&](Rank& rank) {
    Net one, other;
    const Topology topology({{"pipe", 2}, {"data", 2}});
    InitializeOptions options = options_of(2);
    std::get<Config>(options.config).batch.train_batch_size *= 2;
    StepEngine engine(rank.world(), topology, one, stage_of, {}, options);
    EXPECT_SAYS(error_of([&] { const StepEngine beside(engine, other, stage_of, options); }),
                "several models in one step function: ZeRO stage 2 or 3 is not there yet with them");
  });
}

}  // namespace step_models
}  // namespace trireme::testing
