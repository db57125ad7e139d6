#include "trireme/training/training.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/training/scopes.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int kRanks = 2, kSteps = 3;

TrainingOptions options_of(const ZeroStage& stage) {
  Config config = default_config(kRanks);
  config.pager = stage.policy;
  return {.config = config};
}

/// A backward pass of this rank's `micro_batch`.
void backward(Training& training, const TrainedModel& model, const Rank& rank, int64_t micro_batch) {
  const ForwardScope scope = training.begin_forward();
  const at::Tensor loss = model.loss({kRanks * micro_batch + rank.id(), micro_batch});
  training.step().backward_from({torch::autograd::impl::gradient_edge(loss)}, {at::ones_like(loss)}, {});
}

OptimizerChoice adam() { return {.optimizer = OptimizerOptions{.lr = 1e-2}}; }

using Tensors = std::map<std::string, at::Tensor>;

/// The weights on rank 0 after some steps, whose optimizer comes with the module, or after `passes` backward passes.
Tensors trained(const ZeroStage& stage, std::optional<int> passes_before_optimizer) {
  Tensors weights;
  run_ranks(kRanks, [&](Rank& rank) {
    const TrainedModel model = make_mlp();
    TrainingOptions options = options_of(stage);
    if (!passes_before_optimizer) std::get<Config>(options.config).optimizer = adam().optimizer;
    Training training(rank.world(), *model.module, options);
    for (int pass = 0; pass < passes_before_optimizer.value_or(0); ++pass) backward(training, model, rank, 100 + pass);
    if (passes_before_optimizer.value_or(0) > 0) training.step().zero_grad();
    if (passes_before_optimizer) training.set_optimizer(adam());
    for (int step = 0; step < kSteps; ++step) {
      backward(training, model, rank, step);
      EXPECT_TRUE(training.step().step().ended_window);
    }
    EXPECT_EQ(training.step().known_progress().global_steps, kSteps);
    training.destroy();
    if (rank.id() == 0) weights = parameters_of(*model.module);
  });
  return weights;
}

class EachZeroStage : public ::testing::TestWithParam<ZeroStage> {};

TEST_P(EachZeroStage, TakesItsOptimizerLaterToTheSameBits) {
  const Tensors expected = trained(GetParam(), std::nullopt);
  for (const int passes : {0, 2}) {
    const Tensors later = trained(GetParam(), passes);
    ASSERT_EQ(later.size(), expected.size());
    for (const auto& [name, weight] : expected) EXPECT_TRUE(at::equal(later.at(name), weight)) << name << passes;
  }
}

TEST_P(EachZeroStage, GivesGradientsWithoutAnOptimizerAfterEachPass) {
  run_ranks(kRanks, [&](Rank& rank) {
    const TrainedModel model = make_mlp();
    const TrainedModel plain = make_mlp();
    Training training(rank.world(), *model.module, options_of(GetParam()));
    const auto parameters = model.module->named_parameters();
    for (int pass = 0; pass < 2; ++pass) {
      backward(training, model, rank, pass);
      for (int of_rank = 0; of_rank < kRanks; ++of_rank)
        (plain.loss({kRanks * pass + of_rank, pass}) / kRanks).backward();
      for (const auto& item : plain.module->named_parameters()) {
        const auto gradient = safe_get_full_grad(parameters[item.key()]);
        ASSERT_TRUE(gradient) << item.key();
        EXPECT_TRUE(at::allclose(*gradient, item.value().grad(), 1e-4, 1e-6)) << item.key() << ", pass " << pass;
      }
    }
    const at::Tensor& first = parameters[0].value();
    const at::Tensor written = at::ones(first.sizes());
    safe_set_full_grad(first, written);
    backward(training, model, rank, 2);
    plain.module->zero_grad();
    for (int of_rank = 0; of_rank < kRanks; ++of_rank) (plain.loss({kRanks * 2 + of_rank, 2}) / kRanks).backward();
    const auto sum = safe_get_full_grad(first);
    ASSERT_TRUE(sum);
    EXPECT_TRUE(at::allclose(*sum, written + plain.module->parameters()[0].grad(), 1e-4, 1e-6));
    training.step().zero_grad();
    EXPECT_SAYS(error_of<StateError>([&] { training.step().step(); }), "step: there is no optimizer");
    training.destroy();
  });
}

INSTANTIATE_TEST_SUITE_P(Training, EachZeroStage, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

TEST(Training, RefusesAnOptimizerThatCannotTrainBeforeAnythingIsChanged) {
  run_ranks(kRanks, [&](Rank& rank) {
    const TrainedModel model = make_mlp();
    Training training(rank.world(), *model.module, options_of(kZeroStages[2]));
    EXPECT_SAYS(error_of<ConfigError>([&] { training.set_optimizer({}); }), "set_optimizer: neither");
    EXPECT_SAYS(error_of<ConfigError>([&] { training.set_optimizer({.optimizer = OptimizerOptions{.lr = -1}}); }),
                "lr");
    OptimizerChoice choice = adam();
    choice.parameter_groups = {{.patterns = {"no such parameter"}, .lr = 1e-4}};
    EXPECT_SAYS(error_of<ConfigError>([&] { training.set_optimizer(choice); }),
                "parameter_groups[0]: no parameter is left");
    training.set_optimizer(adam());
    EXPECT_SAYS(error_of<StateError>([&] { training.set_optimizer(adam()); }), "there is an optimizer already");
    training.destroy();
    EXPECT_SAYS(error_of<StateError>([&] { training.set_optimizer(adam()); }), "the engine was destroyed");
  });
}

TEST(Training, RefusesCallsAfterDestroyByName) {
  run_ranks(kRanks, [&](Rank& rank) {
    const TrainedModel model = make_mlp();
    TrainingOptions options = options_of(kZeroStages[2]);
    std::get<Config>(options.config).optimizer = adam().optimizer;
    Training training(rank.world(), *model.module, options);
    backward(training, model, rank, 0);
    EXPECT_TRUE(training.step().step().ended_window);
    training.destroy();

    const auto expect_refused = [](const char* call, const std::function<void()>& run) {
      EXPECT_SAYS(error_of<StateError>(run), std::string(call) + ": the engine was destroyed");
    };
    const at::Tensor loss = at::ones({1}).requires_grad_().sum();
    TrainStep& step = training.step();
    expect_refused("forward", [&] { (void)training.begin_forward(); });
    expect_refused("set_train_batch_size", [&] { training.set_batch("set_train_batch_size", 1, 2); });
    expect_refused("no_sync", [&] { const NoSync scope(training); });
    expect_refused("coalesce_grad_reduction", [&] { const CoalescedReduction scope(training); });
    expect_refused("backward", [&] {
      step.backward_from({torch::autograd::impl::gradient_edge(loss)}, {at::ones_like(loss)}, {});
    });
    expect_refused("step", [&] { step.step(); });
    expect_refused("step", [&] { step.end_window(); });
    expect_refused("zero_grad", [&] { step.zero_grad(); });
    expect_refused("step_without_gradients", [&] { step.step_without_gradients(); });
    EXPECT_EQ(step.known_progress().global_steps, 1);
  });
}

TEST(Training, RefusesAnOptimizerAmongGradientsWithoutItsLossScale) {
  run_ranks(kRanks, [&](Rank& rank) {
    torch::manual_seed(0);
    torch::nn::Linear net(4, 2);
    TrainingOptions options = options_of(kZeroStages[1]);
    std::get<Config>(options.config).precision.weight_dtype = at::kHalf;
    std::get<Config>(options.config).precision.loss_scale.loss_scale = 1024;
    Training training(rank.world(), *net, options);
    const auto pass = [&] {
      const at::Tensor loss = training.step().scale(net->forward(at::ones({1, 4}, at::kHalf)).sum());
      training.step().backward_from({torch::autograd::impl::gradient_edge(loss)}, {at::ones_like(loss)}, {});
      return safe_get_full_grad(net->weight).value();
    };
    const at::Tensor gradient = pass();
    EXPECT_SAYS(error_of<StateError>([&] { training.set_optimizer(adam()); }), "call zero_grad() first");
    EXPECT_TRUE(at::equal(safe_get_full_grad(net->weight).value(), gradient));
    training.step().zero_grad();
    training.set_optimizer(adam());
    EXPECT_EQ(training.step().loss_scale(), 1024);
    EXPECT_TRUE(at::equal(pass(), gradient));
    EXPECT_TRUE(training.step().step().ended_window);
    training.destroy();
  });
}

}  // namespace
}  // namespace trireme
