// The arithmetic at a step's end, written once: over double and bool on the host, over [] fp64 and [] bool tensors on a
// device, where nothing of it waits.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <cmath>

#include "trireme/precision/loss_scaler.h"

namespace trireme::step_arithmetic {

// Operations on a number of the host (double, bool) and on a scalar tensor.
inline double choose(bool condition, double then, double otherwise) { return condition ? then : otherwise; }
inline at::Tensor choose(const at::Tensor& condition, const at::Tensor& then, const at::Tensor& otherwise) {
  return at::where(condition, then, otherwise);
}
inline bool both(bool a, bool b) { return a && b; }
inline at::Tensor both(const at::Tensor& a, const at::Tensor& b) { return a.logical_and(b); }
inline double at_most(double value, double limit) { return std::min(limit, value); }
inline at::Tensor at_most(const at::Tensor& value, double limit) { return value.clamp_max(limit); }
inline double at_least(double value, double limit) { return std::max(value, limit); }
inline at::Tensor at_least(const at::Tensor& value, double limit) { return value.clamp_min(limit); }
inline double remainder(double value, double divisor) { return std::fmod(value, divisor); }
inline at::Tensor remainder(const at::Tensor& value, double divisor) { return value.remainder(divisor); }
inline double number_like(double, double value) { return value; }
inline at::Tensor number_like(const at::Tensor& other, double value) { return at::full_like(other, value); }

/// The factor of gradients with this norm, as in torch's clip_grad_norm_: the small number keeps a norm of zero
/// from dividing.
template <class Number>
Number clip_factor(const Number& norm, double max_norm) {
  return at_most(max_norm / (norm + 1e-6), 1);
}

/// A dynamic loss scale between two steps. Every number is exact in fp64.
template <class Number>
struct LossScaleState {
  Number scale, steps, last_overflow, hysteresis;  ///< as LossScaler::State
};

/// The result of follow().
template <class Number, class Flag>
struct LossScaleStep {
  LossScaleState<Number> next;
  Flag at_minimum;  ///< an overflow at the smallest scale, which under kHysteresis is an error
};

/// The loss scale after a step that was taken with `now.scale` and overflowed or not.
///
/// Source    the reference tables of tests/precision/loss_scaler_test.cpp.
template <class Number, class Flag>
LossScaleStep<Number, Flag> follow(const LossScaleOptions& options, LossScaleRule rule,
                                   const LossScaleState<Number>& now, const Flag& overflow) {
  constexpr double kFactor = 2;
  const bool is_patient = rule != LossScaleRule::kClamp;
  const auto window = static_cast<double>(options.loss_scale_window);
  // Steps without overflow since the last one; this one counts under one of the rules.
  const Number stable = now.steps - now.last_overflow - (rule == LossScaleRule::kHysteresisAndClamp ? 0 : 1);
  const Flag doubles = both(stable > 0, remainder(stable, window) == 0);
  const Number full = number_like(now.hysteresis, static_cast<double>(options.hysteresis));
  const Number halved = at_least(now.scale / kFactor, options.min_loss_scale);
  const Flag halves = now.hysteresis <= 1;
  const Number lowered = is_patient ? choose(halves, halved, now.scale) : halved;
  const Number patience = is_patient ? at_least(now.hysteresis - 1, 1) : now.hysteresis;
  const Number refilled = options.consecutive_hysteresis ? full : choose(doubles, full, now.hysteresis);

  LossScaleState<Number> next{.scale = choose(overflow, lowered, choose(doubles, now.scale * kFactor, now.scale)),
                              .steps = now.steps + 1,
                              .last_overflow = choose(overflow, now.steps, now.last_overflow),
                              .hysteresis = choose(overflow, patience, refilled)};
  const Flag at_minimum = both(overflow, both(halves, now.scale == options.min_loss_scale));
  return {next, at_minimum};
}

}  // namespace trireme::step_arithmetic
