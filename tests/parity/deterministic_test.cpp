// With `deterministic` the same global batch gives the same weights, bit for bit, at any number of ranks, at any ZeRO
// stage and under both gather policies.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/dropout.h>
#include <xxhash.h>

#include <tuple>

#include "tests/parity/cases.h"
#include "tests/support/run_ranks.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/engine/engine.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int kGlobalSteps = 20;
constexpr int64_t kMicroBatches = 8;  // of each step, over all ranks

struct DroppingMlpImpl : torch::nn::Module {
  DroppingMlpImpl() {
    first = register_module("first", torch::nn::Linear(9, 33));
    second = register_module("second", torch::nn::Linear(33, 3));
    draw_weights(*this);
  }
  at::Tensor forward(const at::Tensor& input) {
    return second->forward(torch::dropout(torch::tanh(first->forward(input)), 0.3, is_training()));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};

TrainedModel make_dropping_mlp() {
  auto net = std::make_shared<DroppingMlpImpl>();
  return {net, [net](const MicroBatch& batch) {
            const at::Tensor input = input_of(*net, batch, {4, 9});
            return torch::mse_loss(net->forward(input).to(at::kFloat), input.narrow(1, 0, 3).to(at::kFloat));
          }};
}

// `rare` is used in every fourth micro-batch, so on some ranks and not on others.
TrainedModel make_uneven_net() {
  TrainedModel model = make_tied_net();
  return {model.module, [loss = model.loss](const MicroBatch& batch) { return loss({batch.number, batch.number}); }};
}

struct ShardedRun {
  int world = 1;
  ZeroStage stage = kZeroStages.front();
  at::ScalarType dtype = at::kFloat;
  at::ScalarType accumulation = at::kFloat;
};

Config config_of(const ShardedRun& run) {
  Config config = default_config(run.world);
  config.batch = {kMicroBatches, 1, kMicroBatches / run.world};
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 2e-3, .weight_decay = 0.05};
  config.precision.weight_dtype = run.dtype;
  config.precision.buffer_dtype = run.dtype;  // libtorch's BatchNorm wants its averages in it
  config.precision.accumulation_dtype = run.accumulation;
  config.gradient_clipping = 0.5;  // small enough that the norm counts in most steps
  config.pager = run.stage.policy;
  config.pager.deterministic = true;
  return config;
}

uint64_t hash_of(const std::map<std::string, at::Tensor>& tensors) {
  uint64_t hash = 0;
  for (const auto& [name, tensor] : tensors)
    hash = XXH3_64bits_withSeed(tensor.contiguous().const_data_ptr(), tensor.nbytes(), hash);
  return hash;
}

enum class Backward { kEngine, kDirect };

uint64_t train(const std::function<TrainedModel()>& make, const ShardedRun& run,
               Backward backward = Backward::kEngine) {
  uint64_t hash = 0;
  run_ranks(run.world, [&](Rank& rank) {
    at::set_num_threads(1);
    manual_seed(100 + static_cast<uint64_t>(rank.id()));  // rank 0's counts
    TrainedModel model = make();
    Engine engine(rank.world(), *model.module, {.config = config_of(run)});
    for (int64_t number = rank.id(); number < kGlobalSteps * kMicroBatches; number += rank.size()) {
      const at::Tensor loss = model.loss({number, number / rank.size()});
      backward == Backward::kEngine ? (void)engine.backward(loss) : loss.backward();
      engine.step();
    }
    engine.destroy();
    if (rank.id() == rank.size() - 1) hash = hash_of(parameters_of(*model.module));
  });
  return hash;
}

class Deterministic : public ::testing::TestWithParam<std::tuple<ModelCase, at::ScalarType>> {};

TEST_P(Deterministic, WeightsAreTheSameAtEveryWorldAndStage) {
  const auto& [model, dtype] = GetParam();
  const uint64_t expected = train(model.make, {.dtype = dtype});
  for (const int world : {1, 2, 4, 8})
    for (const ZeroStage& stage : kZeroStages) {
      if (model.name == "Uneven" && stage.policy.gather == GatherPolicy::kCopy) continue;  // ranks use different units
      EXPECT_EQ(train(model.make, {world, stage, dtype}), expected) << world << " ranks, " << stage.name;
    }
}

const auto kName = [](const auto& info) {
  return std::get<0>(info.param).name + (std::get<1>(info.param) == at::kFloat ? "Fp32" : "Bf16");
};
INSTANTIATE_TEST_SUITE_P(Models, Deterministic,
                         ::testing::Combine(::testing::Values(ModelCase{"Mlp", make_mlp},
                                                              ModelCase{"DroppingMlp", make_dropping_mlp},
                                                              ModelCase{"Uneven", make_uneven_net}),
                                            ::testing::Values(at::kFloat, at::kBFloat16)),
                         kName);
INSTANTIATE_TEST_SUITE_P(Slow, Deterministic,
                         ::testing::Combine(::testing::Values(ModelCase{"ConvNet", make_conv_net},
                                                              ModelCase{"Llama", make_llama}),
                                            ::testing::Values(at::kFloat, at::kBFloat16)),
                         kName);

TEST(DeterministicOrder, HoldsForDirectBackwardCallsAndSixteenBitSums) {
  const ShardedRun alone{.dtype = at::kBFloat16, .accumulation = at::kBFloat16};
  const uint64_t expected = train(make_mlp, alone);
  EXPECT_NE(expected, train(make_mlp, {.dtype = at::kBFloat16}));
  for (const ZeroStage& stage : kZeroStages) {
    ShardedRun run = alone;
    run.world = 4;
    run.stage = stage;
    EXPECT_EQ(train(make_mlp, run, Backward::kDirect), expected) << stage.name;
  }
}

TEST(DeterministicOrder, RefusesAnotherBackwardAfterItsSumsWereRead) {
  run_ranks(1, [](Rank& rank) {
    const TrainedModel model = make_mlp();
    Engine engine(rank.world(), *model.module, {.config = config_of({})});
    engine.backward(model.loss({0, 0}));
    EXPECT_TRUE(safe_get_full_grad(model.module->parameters()[0]).has_value());
    try {
      engine.backward(model.loss({1, 1}));
      FAIL() << "not refused";
    } catch (const StateError& error) {
      EXPECT_NE(std::string(error.what()).find("after this window's gradients were read or reduced"), std::string::npos)
          << error.what();
    }
  });
}

}  // namespace
}  // namespace trireme
