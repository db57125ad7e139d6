// The decisions of a device against those of the host, over random traces of overflows.
#include "trireme/precision/device_decider.h"

#include <ATen/ops/full.h>
#include <ATen/ops/scalar_tensor.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <limits>
#include <random>

#include "tests/support/fake_device/fake_device.h"
#include "trireme/precision/grad_scaler.h"

namespace trireme {
namespace {

using namespace testing;

at::Tensor squares(double norm) {
  return at::full({}, norm * norm, at::TensorOptions().dtype(at::kDouble).device(fake_device()));
}

TEST(GradScalerOnDevices, UnscalesAndFindsOverflowsThere) {
  FakeRecord record;
  const at::TensorOptions options = at::TensorOptions().device(fake_device());
  at::Tensor parameter = at::full({4}, 1.0, options).requires_grad_();
  torch::optim::SGD optimizer({parameter}, torch::optim::SGDOptions(0.5));
  GradScaler scaler({.init_scale = 8});
  for (const double gradient : {2.0, std::numeric_limits<double>::infinity()}) {
    parameter.mutable_grad() = at::full({4}, 8 * gradient, options);
    EXPECT_EQ(scaler.step(optimizer), std::isfinite(gradient));
    scaler.update();
  }
  EXPECT_TRUE(parameter.detach().cpu().eq(0).all().item<bool>());
}

struct Case {
  const char* name;
  LossScaleOptions options;
  LossScaleRule rule;
};

class DeviceScale : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceScale, GoesTheWayOfTheHosts) {
  FakeRecord record;
  const auto& [name, options, rule] = GetParam();
  LossScaler host(options, rule);
  DeviceDecider device(fake_device(), {.skips = true, .loss_scale = options, .rule = rule});
  std::mt19937 random(7);
  int64_t applied = 0;
  for (int step = 0; step < 300; ++step) {
    const bool overflow = random() % 5 == 0;
    const double norm = overflow ? std::numeric_limits<double>::infinity() : 3 * host.scale();
    const double scale = host.scale();
    host.update(overflow);
    const DeviceDecider::Decision decision = device.decide(squares(norm), 1.0);
    applied += overflow ? 0 : 1;
    EXPECT_EQ(decision.skip.item<float>(), overflow ? 1 : 0);
    if (!overflow) {
      EXPECT_EQ(decision.gradient_factor.item<float>(), static_cast<float>(1.0 / (3 + 1e-6) / scale));
    }
    const DeviceDecider::Outcome outcome = device.read();
    EXPECT_EQ(outcome.scaler, host.state()) << name << ", step " << step;
    EXPECT_EQ(outcome.applied, !overflow);
    EXPECT_EQ(outcome.steps, step + 1);
    EXPECT_EQ(outcome.applied_steps, applied);
    EXPECT_FALSE(outcome.at_minimum);
    EXPECT_EQ(device.loss_scale().item<float>(), static_cast<float>(host.scale()));
  }
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(
    Rules, DeviceScale,
    ::testing::Values(
        Case{"hysteresis", {.initial_scale_power = 120, .loss_scale_window = 4}, LossScaleRule::kHysteresis},
        Case{"consecutive",
             {.initial_scale_power = 120, .loss_scale_window = 3, .consecutive_hysteresis = true},
             LossScaleRule::kHysteresis},
        Case{"both",
             {.initial_scale_power = 8, .loss_scale_window = 6, .hysteresis = 2},
             LossScaleRule::kHysteresisAndClamp},
        Case{"clamp", {.initial_scale_power = 8, .loss_scale_window = 6}, LossScaleRule::kClamp},
        Case{"fixed", {.loss_scale = 1024}, LossScaleRule::kHysteresis}),
    [](const auto& info) { return info.param.name; });

TEST(DeviceDecider, AsksTheHostForNothing) {
  FakeRecord record;
  DeviceDecider decider(fake_device(), {.skips = true, .loss_scale = LossScaleOptions{}});
  const int64_t before = record.host_waits();
  for (int step = 0; step < 5; ++step) {
    (void)decider.decide(squares(step), 1.0);
    const auto seen = decider.look();
    ASSERT_TRUE(seen.has_value());
    EXPECT_EQ(seen->applied_steps, step + 1);
  }
  EXPECT_FALSE(decider.look().has_value());
  EXPECT_EQ(record.host_waits(), before);
}

TEST(DeviceDecider, AnOverflowAtTheMinimumIsTold) {
  FakeRecord record;
  DeviceDecider decider(fake_device(), {.loss_scale = LossScaleOptions{.initial_scale_power = 0, .hysteresis = 1}});
  (void)decider.decide(squares(1), 0);
  EXPECT_FALSE(decider.read().at_minimum);
  (void)decider.decide(squares(NAN), 0);
  EXPECT_TRUE(decider.read().at_minimum);
}

TEST(DeviceDecider, WithoutSkippingEveryStepCounts) {
  FakeRecord record;
  DeviceDecider decider(fake_device(), {.skips = false});
  const DeviceDecider::Decision decision = decider.decide(squares(NAN), 0);
  EXPECT_FALSE(decision.skip.defined());
  EXPECT_FALSE(decision.gradient_factor.defined());
  EXPECT_EQ(decider.read().applied_steps, 1);
  EXPECT_FALSE(decider.loss_scale().defined());
}

}  // namespace
}  // namespace trireme
