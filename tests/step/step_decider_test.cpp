// The host's decisions and a device's over the same random steps.
#include "step/step_decider.h"

#include <ATen/ops/full.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "tests/support/fake_device/fake_device.h"

namespace trireme {
namespace {

using namespace testing;

at::Tensor squares(double norm, c10::Device device) {
  return at::full({}, norm * norm, at::TensorOptions().dtype(at::kDouble).device(device));
}

Hyperparameters scheduled() {
  return {{{.kind = OptimizerKind::kSgd, .lr = 1}}, {.kind = LrScheduleKind::kLinear, .total_num_steps = 1000}};
}

TEST(StepDeciders, DecideAlike) {
  FakeRecord record;
  const StepRules rules{
      .decisions = {.loss_scale = LossScaleOptions{.initial_scale_power = 100, .loss_scale_window = 5}}, .max_norm = 1};
  const auto host = make_host_decider(rules);
  const auto device = make_device_decider(fake_device(), rules, /*takes_decisions=*/true);
  Hyperparameters of_host = scheduled(), of_device = scheduled();
  std::mt19937 random(7);
  for (int step = 0; step < 200; ++step) {
    const double scale = host->state().scaler.scale;
    const double norm = random() % 4 == 0 ? std::numeric_limits<double>::infinity() : scale * (1 + step % 3);
    if (step % 50 == 3) {
      of_host.set_lr(0, 0.5);
      of_device.set_lr(0, 0.5);
    }
    const bool is_given = step % 50 == 3;
    const double rate = is_given ? 0.5 : of_host.schedule().lr(host->state().applied_steps);
    const auto by_host = host->decide(squares(norm, c10::kCPU), of_host);
    const auto by_device = device->decide(squares(norm, fake_device()), of_device);
    EXPECT_EQ(by_device->decision->skip.item<float>(), by_host ? 0 : 1);
    EXPECT_EQ(by_device->decision->lr[0].item<float>(), static_cast<float>(rate)) << step;
    if (by_host) {
      EXPECT_EQ(by_device->decision->gradient_factor.item<float>(), static_cast<float>(by_host->gradient_factor));
    }
    host->conclude();
    device->conclude();
    EXPECT_EQ(device->outcome().norm, host->outcome().norm);
    EXPECT_EQ(device->outcome().applied, host->outcome().applied);
    EXPECT_EQ(device->state().steps, host->state().steps);
    EXPECT_EQ(device->state().applied_steps, host->state().applied_steps);
    EXPECT_EQ(device->state().scaler, host->state().scaler);
    of_host.follow(host->known_applied_steps());
    of_device.follow(device->known_applied_steps());
  }
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(StepDeciders, OfADeviceMakeNobodyWaitUntilSomebodyAsks) {
  FakeRecord record;
  const auto decider = make_device_decider(fake_device(), {.max_norm = 1}, /*takes_decisions=*/true);
  Hyperparameters hyperparameters = scheduled();
  const auto step = [&] {
    (void)decider->decide(squares(1, fake_device()), hyperparameters);
    decider->conclude();
    (void)decider->applied_if_known();
    hyperparameters.follow(decider->known_applied_steps());
  };
  step();
  const int64_t before = record.host_waits();
  for (int i = 0; i < 3; ++i) step();
  EXPECT_EQ(record.host_waits(), before);
  EXPECT_EQ(decider->state().applied_steps, 4);
  EXPECT_GT(record.host_waits(), before);
}

TEST(StepDeciders, GoOnFromACheckpoint) {
  FakeRecord record;
  const StepRules rules{.decisions = {.loss_scale = LossScaleOptions{.initial_scale_power = 4}}};
  const LossScaler::State saved{.scale = 32, .steps = 9, .last_overflow = 3, .hysteresis = 1};
  for (const auto& decider :
       {std::shared_ptr(make_host_decider(rules)), std::shared_ptr(make_device_decider(fake_device(), rules, true))}) {
    EXPECT_EQ(decider->state().scaler.scale, 16);
    decider->set(9, 8, saved);
    EXPECT_EQ(decider->known_applied_steps(), 8);
    EXPECT_EQ(decider->state().scaler, saved);
    decider->set(4, 4, std::nullopt);
    EXPECT_EQ(decider->state().steps, 4);
    EXPECT_EQ(decider->state().scaler, saved);
  }
}

}  // namespace
}  // namespace trireme
