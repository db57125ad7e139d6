// Mode `low` at every stage against one plain libtorch process whose model, gradients and states are bf16 all along.
#include <ATen/Parallel.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "optim/update.h"
#include "tests/parity/cases.h"
#include "tests/support/run_ranks.h"
#include "trireme/engine/engine.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int kLowSteps = 20;

using WeightsByName = std::map<std::string, at::Tensor>;

std::vector<OptimizerOptions> low_optimizers() {
  return {{.kind = OptimizerKind::kAdamW, .lr = 2e-3, .weight_decay = 0.05},
          {.kind = OptimizerKind::kSgd, .lr = 0.05, .momentum = 0.9}};
}

Config low_config(const OptimizerOptions& optimizer, int world, const ZeroStage& stage, double clipping) {
  Config config = default_config(world);
  config.batch = {world, 1, 1};
  config.optimizer = optimizer;
  config.precision = {.weight_dtype = at::kBFloat16,
                      .accumulation_dtype = at::kBFloat16,
                      .update_dtype = at::kBFloat16,
                      .buffer_dtype = at::kBFloat16};  // libtorch's BatchNorm wants its averages in it
  config.gradient_clipping = clipping;
  config.pager = stage.policy;
  return config;
}

WeightsByName train_low(const ModelCase& model_case, const Config& config, int world) {
  WeightsByName tensors;
  run_ranks(world, [&](Rank& rank) {
    at::set_num_threads(1);
    TrainedModel model = model_case.make();
    Engine engine(rank.world(), *model.module, {.config = config});
    for (int64_t step = 0; step < kLowSteps; ++step) {
      engine.backward(model.loss({step * world + rank.id(), step}));
      engine.step();
    }
    engine.destroy();
    if (rank.id() == 0) tensors = parameters_of(*model.module);
  });
  return tensors;
}

/// A model in bf16, and the mean of each step's gradients over `world` micro-batches, rounded once.
class PlainBf16 {
 public:
  PlainBf16(const ModelCase& model_case, const OptimizerOptions& optimizer)
      : model_(model_case.make()), optimizer_(optimizer) {
    model_.module->to(at::kBFloat16);
  }

  WeightsByName run(int world) {
    for (int64_t step = 0; step < kLowSteps; ++step) {
      std::vector<std::map<std::string, at::Tensor>> gradients;
      for (int64_t rank = 0; rank < world; ++rank) gradients.push_back(gradients_of({step * world + rank, step}));
      const torch::NoGradGuard no_grad;
      std::set<const void*> seen;  // a tied parameter has several names
      for (const auto& item : model_.module->named_parameters()) {
        if (!seen.insert(item.value().unsafeGetTensorImpl()).second) continue;
        at::Tensor sum;
        for (const auto& of_rank : gradients)
          if (const auto found = of_rank.find(item.key()); found != of_rank.end())
            sum = sum.defined() ? sum + found->second : found->second;
        if (sum.defined()) update_parameter(item.key(), item.value(), (sum / world).to(at::kBFloat16));
      }
    }
    return parameters_of(*model_.module);
  }

 private:
  std::map<std::string, at::Tensor> gradients_of(const MicroBatch& batch) {
    model_.module->zero_grad();
    model_.loss(batch).backward();
    std::map<std::string, at::Tensor> gradients;
    for (const auto& item : model_.module->named_parameters())
      if (item.value().grad().defined()) gradients[item.key()] = item.value().grad().to(at::kFloat);
    return gradients;
  }

  void update_parameter(const std::string& name, const at::Tensor& weights, const at::Tensor& gradient) {
    const bool is_new = states_.count(name) == 0;
    UpdateSpan& span = states_[name];
    span.master = span.weights = weights.detach().view(-1);
    span.gradients = gradient.reshape(-1);
    if (is_new) span.first = at::zeros_like(span.weights);
    if (is_new) span.second = at::zeros_like(span.weights);
    update(span, optimizer_, /*gradient_factor=*/1, ++steps_[name]);
  }

  TrainedModel model_;
  const OptimizerOptions optimizer_;
  std::map<std::string, UpdateSpan> states_;
  std::map<std::string, int64_t> steps_;
};

void expect_same_bits(const WeightsByName& found, const WeightsByName& expected, const std::string& where) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : found) {
    EXPECT_EQ(tensor.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(tensor, expected.at(name))) << where << ", " << name;
  }
}

class LowParity : public ::testing::TestWithParam<ModelCase> {};

TEST_P(LowParity, OfEveryStageIsThatOfPlainBf16BitByBit) {
  for (const OptimizerOptions& optimizer : low_optimizers())
    for (const int world : {1, 2}) {
      const WeightsByName expected = PlainBf16(GetParam(), optimizer).run(world);
      for (const ZeroStage& stage : kZeroStages)
        expect_same_bits(train_low(GetParam(), low_config(optimizer, world, stage, 0), world), expected,
                         str(optimizer_name(optimizer.kind), ", ", world, " ranks, ", stage.name));
    }
}

TEST_P(LowParity, OfEveryStageIsTheSameUnderClipping) {
  const OptimizerOptions optimizer = low_optimizers()[0];
  const WeightsByName expected = train_low(GetParam(), low_config(optimizer, 2, kZeroStages[0], 0.1), 2);
  for (const ZeroStage& stage : kZeroStages)
    expect_same_bits(train_low(GetParam(), low_config(optimizer, 2, stage, 0.1), 2), expected, stage.name);
}

TEST_P(LowParity, OfEveryStageIsTheSameUnderStochasticRounding) {
  for (const OptimizerOptions& optimizer : low_optimizers()) {
    const auto train = [&](const ZeroStage& stage, bool is_stochastic) {
      Config config = low_config(optimizer, 2, stage, 0);
      config.precision.stochastic_rounding = is_stochastic;
      return train_low(GetParam(), config, 2);
    };
    const WeightsByName expected = train(kZeroStages[0], true);
    for (const ZeroStage& stage : kZeroStages) expect_same_bits(train(stage, true), expected, stage.name);
    const WeightsByName nearest = train(kZeroStages[0], false);
    EXPECT_FALSE(std::all_of(nearest.begin(), nearest.end(),
                             [&](const auto& one) { return at::equal(one.second, expected.at(one.first)); }));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, LowParity,
                         ::testing::Values(ModelCase{"Mlp", make_mlp}, ModelCase{"ConvNet", make_conv_net},
                                           ModelCase{"Llama", make_llama}, ModelCase{"TiedNet", make_tied_net}),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace trireme
