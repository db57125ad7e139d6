// GradScaler with optimizers of libtorch, step by step against what its rules give by hand.
#include "trireme/precision/grad_scaler.h"

#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <limits>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

/// One weight of 8, SGD with lr 1: a step takes its gradient away.
struct Training {
  at::Tensor weight = at::full({1}, 8.0f).requires_grad_();
  torch::optim::SGD optimizer{{weight}, torch::optim::SGDOptions(1.0)};

  /// A loss whose gradient is `gradient`.
  at::Tensor loss(float gradient) { return (weight * gradient).sum(); }
  float value() const { return weight.item<float>(); }
  void clear() { weight.mutable_grad().reset(); }
};

constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST(GradScaler, StepsWithTheUnscaledGradient) {
  Training training;
  GradScaler scaler;
  scaler.scale(training.loss(0.5)).backward();
  EXPECT_EQ(training.weight.grad().item<float>(), 32768);
  EXPECT_TRUE(scaler.step(training.optimizer));
  EXPECT_EQ(training.value(), 7.5);
}

TEST(GradScaler, ShowsTheUnscaledGradientForClipping) {
  Training training;
  GradScaler scaler;
  scaler.scale(training.loss(4)).backward();
  scaler.unscale_(training.optimizer);
  EXPECT_EQ(training.weight.grad().item<float>(), 4);
  training.weight.mutable_grad().clamp_(-1, 1);
  EXPECT_TRUE(scaler.step(training.optimizer));
  EXPECT_EQ(training.value(), 7);
}

TEST(GradScaler, SkipsOverflowsAndFollowsTheSequenceByHand) {
  Training training;
  GradScaler scaler({.init_scale = 64, .growth_factor = 4, .backoff_factor = 0.25, .growth_interval = 3});
  // Gradient of each iteration, and the scale after its update().
  const std::vector<std::pair<float, double>> table = {
      {1, 64},        {1, 64}, {1, 256}, {kInfinity, 64}, {1, 64}, {1, 64}, {std::nanf(""), 16},
      {kInfinity, 4}, {0, 4},  {0, 4},   {0, 16},         {0, 16}, {0, 16}, {0, 64}};
  for (const auto& [gradient, scale] : table) {
    training.clear();
    scaler.scale(training.loss(gradient)).backward();
    EXPECT_EQ(scaler.step(training.optimizer), std::isfinite(gradient));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), scale);
  }
  EXPECT_EQ(training.value(), 3);  // 8 less the five gradients of 1
}

TEST(GradScaler, AnOverflowOfOneOptimizerSkipsOnlyItsStepButLowersTheScale) {
  Training a, b;
  GradScaler scaler;
  scaler.scale(a.loss(kInfinity)).backward();
  scaler.scale(b.loss(1)).backward();
  EXPECT_FALSE(scaler.step(a.optimizer));
  EXPECT_TRUE(scaler.step(b.optimizer));
  scaler.update();
  EXPECT_EQ(a.value(), 8);
  EXPECT_EQ(b.value(), 7);
  EXPECT_EQ(scaler.get_scale(), 32768);
}

TEST(GradScaler, DoesNotGrowBeyondWhatALossCanBeMultipliedWith) {
  Training training;
  GradScaler scaler({.init_scale = 0x1p127, .growth_interval = 1});
  scaler.scale(training.loss(0)).backward();
  scaler.step(training.optimizer);
  scaler.update();
  EXPECT_EQ(scaler.get_scale(), 0x1p127);
}

TEST(GradScaler, SwitchedOffLeavesEverythingAlone) {
  Training training;
  GradScaler scaler({.enabled = false});
  const at::Tensor loss = training.loss(kInfinity);
  EXPECT_TRUE(scaler.scale(loss).is_same(loss));
  loss.backward();
  scaler.unscale_(training.optimizer);
  EXPECT_TRUE(scaler.step(training.optimizer));
  scaler.update();
  EXPECT_EQ(training.value(), -kInfinity);
  EXPECT_EQ(scaler.get_scale(), 1);
}

TEST(GradScaler, ContinuesFromItsState) {
  Training training;
  GradScaler scaler({.init_scale = 8, .growth_interval = 2});
  scaler.scale(training.loss(1)).backward();
  scaler.step(training.optimizer);
  scaler.update();
  GradScaler resumed;
  resumed.set_state(scaler.state());
  EXPECT_EQ(resumed.growth_interval(), 2);
  EXPECT_EQ(resumed.growth_factor(), 2);
  EXPECT_EQ(resumed.backoff_factor(), 0.5);
  training.clear();
  resumed.scale(training.loss(1)).backward();
  resumed.step(training.optimizer);
  resumed.update();
  EXPECT_EQ(resumed.get_scale(), 16);
  resumed.update(5);
  EXPECT_EQ(resumed.get_scale(), 5);
}

TEST(GradScaler, CoalescesSparseGradientsBeforeItLooks) {
  at::Tensor table = at::zeros({4, 2}).requires_grad_();
  torch::optim::SGD optimizer({table}, torch::optim::SGDOptions(1.0));
  const at::Tensor index = at::tensor({1, 1}, at::kLong).reshape({1, 2});
  // Each is finite, their sum is not.
  table.mutable_grad() = at::sparse_coo_tensor(index, at::full({2, 2}, 3e38f), {4, 2}, at::kFloat);
  GradScaler scaler;
  EXPECT_FALSE(scaler.step(optimizer));
}

TEST(GradScalerErrors, NameTheCallAndTheFix) {
  Training training;
  GradScaler scaler;
  EXPECT_EQ(testing::error_of<StateError>([&] { scaler.update(); }),
            "update: no gradients were unscaled since the last update(); call step(optimizer) first");
  scaler.scale(training.loss(1)).backward();
  scaler.unscale_(training.optimizer);
  EXPECT_EQ(testing::error_of<StateError>([&] { scaler.unscale_(training.optimizer); }),
            "unscale_: already called for this optimizer since the last update(); call update() first");
  scaler.step(training.optimizer);
  EXPECT_EQ(testing::error_of<StateError>([&] { scaler.step(training.optimizer); }),
            "step: already called for this optimizer since the last update(); call update() first");
  EXPECT_EQ(testing::error_of<StateError>([&] { scaler.unscale_(training.optimizer); }),
            "unscale_: after step() for this optimizer since the last update(); call update() first");
  EXPECT_EQ(testing::error_of<ConfigError>([&] { scaler.update(-1); }),
            "GradScaler: scale=-1: use a finite number above 0");
  EXPECT_EQ(testing::error_of<ConfigError>([] { GradScaler({.growth_factor = 1}); }),
            "GradScaler: growth_factor=1: use a number above 1");
  EXPECT_EQ(testing::error_of<ConfigError>([] { GradScaler({.backoff_factor = 1}); }),
            "GradScaler: backoff_factor=1: use a number between 0 and 1");
  EXPECT_EQ(testing::error_of<ConfigError>([] { GradScaler({.growth_interval = 0}); }),
            "GradScaler: growth_interval=0: use 1 or more steps");
  at::Tensor half = at::ones({1}, at::kHalf).requires_grad_();
  half.mutable_grad() = at::ones({1}, at::kHalf);
  torch::optim::SGD optimizer({half}, torch::optim::SGDOptions(1.0));
  const std::string text = testing::error_of<ShapeError>([&] { scaler.step(optimizer); });
  EXPECT_NE(text.find("got fp16"), std::string::npos) << text;
}

}  // namespace
}  // namespace trireme
