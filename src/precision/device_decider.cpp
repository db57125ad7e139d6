#include "trireme/precision/device_decider.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

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
  const LossScaler start(rules.loss_scale.value_or(LossScaleOptions{.loss_scale = 1}), rules.rule);
  norm_ = number_on(device, 0, at::kDouble);
  is_applied_ = number_on(device, 0, at::kDouble);
  set(0, 0, start.state());
  for (Report& report : reports_) report.values = pinned_memory(kValues, at::kDouble, device);
}

void DeviceDecider::set(int64_t steps, int64_t applied_steps, const LossScaler::State& scaler) {
  steps_so_far_ = steps;
  applied_ = number_on(device_, static_cast<double>(applied_steps), at::kLong);
  if (rules_.loss_scale) scale_ = number_on(device_, scaler.scale, at::kDouble);
  steps_ = number_on(device_, static_cast<double>(scaler.steps), at::kDouble);
  last_overflow_ = number_on(device_, static_cast<double>(scaler.last_overflow), at::kDouble);
  hysteresis_ = number_on(device_, static_cast<double>(scaler.hysteresis), at::kDouble);
  at_minimum_ = number_on(device_, 0, at::kDouble);
  for (Report& report : reports_) report.is_under_way = false;
}

DeviceDecider::Decision DeviceDecider::decide(const at::Tensor& sum_of_squares, double max_norm) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  ++steps_so_far_;
  norm_ = sum_of_squares.sqrt();
  if (scale_.defined()) norm_ = norm_ / scale_;
  const at::Tensor is_finite = at::isfinite(norm_);
  // As torch's clip_grad_norm_: the small number keeps a norm of zero from dividing.
  at::Tensor factor;
  if (max_norm > 0) factor = (max_norm / (norm_ + 1e-6)).clamp_max(1);
  if (scale_.defined()) factor = factor.defined() ? factor / scale_ : scale_.reciprocal();
  is_applied_ = rules_.skips ? is_finite.to(at::kDouble) : number_on(device_, 1, at::kDouble);
  applied_ = applied_ + is_applied_.to(at::kLong);
  Decision decision;
  if (factor.defined()) decision.gradient_factor = factor.to(at::kFloat);
  if (rules_.skips) decision.skip = 1 - is_applied_.to(at::kFloat);
  if (rules_.loss_scale && rules_.loss_scale->loss_scale == 0) follow_overflow(is_finite.logical_not());
  send_report();
  return decision;
}

// LossScaler::update(), without a branch.
void DeviceDecider::follow_overflow(const at::Tensor& overflow) {
  const LossScaleOptions& options = *rules_.loss_scale;
  const at::Tensor lowered = (scale_ / 2).clamp_min(options.min_loss_scale);
  const bool has_hysteresis = rules_.rule == LossScaleRule::kHysteresis;
  const at::Tensor patience = has_hysteresis ? hysteresis_.gt(1) : number_on(device_, 0, at::kBool);
  if (has_hysteresis)
    at_minimum_ = at::where(overflow.logical_and(patience.logical_not()).logical_and(scale_.eq(options.min_loss_scale)),
                            number_on(device_, 1, at::kDouble), at_minimum_);

  const at::Tensor stable = steps_ - last_overflow_ - 1;
  const at::Tensor doubles =
      stable.gt(0).logical_and(stable.remainder(static_cast<double>(options.loss_scale_window)).eq(0));
  const at::Tensor refills = options.consecutive_hysteresis ? number_on(device_, 1, at::kBool) : doubles;
  const at::Tensor full = number_on(device_, static_cast<double>(options.hysteresis), at::kDouble);

  scale_ = at::where(overflow, at::where(patience, scale_, lowered), at::where(doubles, scale_ * 2, scale_));
  hysteresis_ =
      at::where(overflow, at::where(patience, hysteresis_ - 1, hysteresis_), at::where(refills, full, hysteresis_));
  last_overflow_ = at::where(overflow, steps_, last_overflow_);
  steps_ = steps_ + 1;
}

at::Tensor DeviceDecider::present() const {
  const at::Tensor scale = scale_.defined() ? scale_ : number_on(device_, 1, at::kDouble);
  return at::stack(
      {norm_, is_applied_, applied_.to(at::kDouble), scale, steps_, last_overflow_, hysteresis_, at_minimum_});
}

void DeviceDecider::send_report() {
  Report& report = reports_[next_report_];
  if (report.is_under_way && !report.arrived.is_reached()) return;  // the next one says all that this one would
  report.values.copy_(present(), /*non_blocking=*/true);
  report.arrived = Mark::here(device_);
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
    if (!report.is_under_way || !report.arrived.is_reached()) continue;
    newest = outcome_of(report.values, report.steps);
    report.is_under_way = false;
  }
  return newest;
}

}  // namespace trireme
