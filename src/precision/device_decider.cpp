#include "trireme/precision/device_decider.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>

#include "trireme/device/device.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

constexpr int64_t kValues = 8;  // of a report

at::Tensor number_on(c10::Device device, double value, at::ScalarType dtype) {
  return at::full({}, value, at::TensorOptions().dtype(dtype).device(device));
}

}  // namespace

DeviceDecider::DeviceDecider(c10::Device device, const DecisionRules& rules) : device_(device), rules_(rules) {
  norm_ = number_on(device, 0, at::kDouble);
  is_applied_ = number_on(device, 0, at::kDouble);
  set(0, 0, rules.scaler().state());
  for (Report& report : reports_) report.values = pinned_memory(kValues, at::kDouble, device);
}

void DeviceDecider::set(int64_t steps, int64_t applied_steps, const LossScaler::State& scaler) {
  steps_so_far_ = steps;
  applied_ = number_on(device_, static_cast<double>(applied_steps), at::kLong);
  const auto number = [&](double value) { return number_on(device_, value, at::kDouble); };
  loss_scale_ = {.scale = rules_.loss_scale ? number(scaler.scale) : at::Tensor(),
                 .steps = number(static_cast<double>(scaler.steps)),
                 .last_overflow = number(static_cast<double>(scaler.last_overflow)),
                 .hysteresis = number(static_cast<double>(scaler.hysteresis))};
  at_minimum_ = number_on(device_, 0, at::kBool);
  for (Report& report : reports_) report.is_under_way = false;
}

DeviceDecider::Decision DeviceDecider::decide(const at::Tensor& sum_of_squares, double max_norm) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  ++steps_so_far_;
  norm_ = sum_of_squares.sqrt();
  const at::Tensor& scale = loss_scale_.scale;
  if (scale.defined()) norm_ = norm_ / scale;
  const at::Tensor is_finite = at::isfinite(norm_);
  at::Tensor factor;
  if (max_norm > 0) factor = step_arithmetic::clip_factor(norm_, max_norm);
  if (scale.defined()) factor = factor.defined() ? factor / scale : scale.reciprocal();
  is_applied_ = rules_.skips ? is_finite.to(at::kDouble) : number_on(device_, 1, at::kDouble);
  applied_ = applied_ + is_applied_.to(at::kLong);
  Decision decision;
  if (factor.defined()) decision.gradient_factor = factor.to(at::kFloat);
  if (rules_.skips) decision.skip = 1 - is_applied_.to(at::kFloat);
  if (rules_.loss_scale && rules_.loss_scale->loss_scale == 0) {
    const auto step = step_arithmetic::follow(*rules_.loss_scale, rules_.rule, loss_scale_, is_finite.logical_not());
    loss_scale_ = step.next;
    if (rules_.rule == LossScaleRule::kHysteresis) at_minimum_ = at_minimum_.logical_or(step.at_minimum);
  }
  send_report();
  return decision;
}

at::Tensor DeviceDecider::present() const {
  const auto& [scale, steps, last_overflow, hysteresis] = loss_scale_;
  return at::stack({norm_, is_applied_, applied_.to(at::kDouble),
                    scale.defined() ? scale : number_on(device_, 1, at::kDouble), steps, last_overflow, hysteresis,
                    at_minimum_.to(at::kDouble)});
}

void DeviceDecider::send_report() {
  Report& report = reports_[next_report_];
  if (report.is_under_way && !report.arrived.is_complete()) return;  // the next one says all that this one would
  report.values.copy_(present(), /*non_blocking=*/true);
  report.arrived = Event::record(device_);
  report.steps = steps_so_far_;
  report.is_under_way = true;
  next_report_ = (next_report_ + 1) % reports_.size();
}

DeviceDecider::Outcome DeviceDecider::outcome_of(const at::Tensor& values, int64_t steps) {
  const double* v = values.const_data_ptr<double>();
  return {.norm = v[0],
          .applied = v[1] != 0,
          .steps = steps,
          .applied_steps = static_cast<int64_t>(v[2]),
          .scaler = {.scale = v[3],
                     .steps = static_cast<int64_t>(v[4]),
                     .last_overflow = static_cast<int64_t>(v[5]),
                     .hysteresis = static_cast<int64_t>(v[6])},
          .at_minimum = v[7] != 0};
}

DeviceDecider::Outcome DeviceDecider::read() {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  for (Report& report : reports_) report.is_under_way = false;
  return outcome_of(present().cpu(), steps_so_far_);
}

std::optional<DeviceDecider::Outcome> DeviceDecider::look() {
  std::optional<Outcome> newest;
  for (size_t i = 0; i < reports_.size(); ++i) {
    Report& report = reports_[(next_report_ + i) % reports_.size()];  // from the oldest on
    if (!report.is_under_way || !report.arrived.is_complete()) continue;
    newest = outcome_of(report.values, report.steps);
    report.is_under_way = false;
  }
  return newest;
}

}  // namespace trireme
