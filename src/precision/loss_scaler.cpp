#include "trireme/precision/loss_scaler.h"

#include <cmath>

#include "precision/positive.h"
#include "trireme/base/error.h"
#include "trireme/precision/step_arithmetic.h"

namespace trireme {

namespace {

constexpr int64_t kLargestPower = 126;  // the scale is a finite fp32 number, and so is its double

}  // namespace

void check_loss_scale(const LossScaleOptions& options) {
  const auto refuse = [](const char* key, double value, const char* fix) {
    throw ConfigError(str("fp16.", key, "=", value, ": ", fix));
  };
  if (options.loss_scale != 0) {
    if (!is_positive(options.loss_scale)) refuse("loss_scale", options.loss_scale, "use 0 (dynamic) or a number above");
    return;
  }
  if (options.initial_scale_power < 0 || options.initial_scale_power > kLargestPower)
    refuse("initial_scale_power", static_cast<double>(options.initial_scale_power), "use 0 to 126");
  if (options.loss_scale_window < 1)
    refuse("loss_scale_window", static_cast<double>(options.loss_scale_window), "use 1 or more steps");
  if (options.hysteresis < 1) refuse("hysteresis", static_cast<double>(options.hysteresis), "use 1 or more overflows");
  if (!is_positive(options.min_loss_scale)) refuse("min_loss_scale", options.min_loss_scale, "use a number above 0");
  const double initial = std::ldexp(1.0, static_cast<int>(options.initial_scale_power));
  if (options.min_loss_scale > initial)
    refuse("min_loss_scale", options.min_loss_scale, "it is above the initial scale, 2^initial_scale_power; lower it");
}

LossScaler::LossScaler(const LossScaleOptions& options, LossScaleRule rule) : options_(options), rule_(rule) {
  check_loss_scale(options);
  state_.scale = is_dynamic() ? std::ldexp(1.0, static_cast<int>(options.initial_scale_power)) : options.loss_scale;
  state_.hysteresis = options.hysteresis;
}

void LossScaler::update(bool overflow) {
  if (!is_dynamic()) return;
  const step_arithmetic::LossScaleState<double> now{.scale = state_.scale,
                                                    .steps = static_cast<double>(state_.steps),
                                                    .last_overflow = static_cast<double>(state_.last_overflow),
                                                    .hysteresis = static_cast<double>(state_.hysteresis)};
  const auto [next, at_minimum] = step_arithmetic::follow(options_, rule_, now, overflow);
  if (at_minimum && rule_ == LossScaleRule::kHysteresis) throw_at_minimum();
  state_ = {.scale = next.scale,
            .steps = static_cast<int64_t>(next.steps),
            .last_overflow = static_cast<int64_t>(next.last_overflow),
            .hysteresis = static_cast<int64_t>(next.hysteresis)};
}

void LossScaler::throw_at_minimum() {
  throw StateError(
      "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run. Gradients are not finite "
      "whatever the scale: lower the learning rate, look for NaN in the data, or use bf16.enabled=true");
}

void LossScaler::set_state(const State& state) {
  const bool possible = is_positive(state.scale) && state.steps >= 0 && state.last_overflow >= -1 &&
                        state.last_overflow < state.steps && state.hysteresis >= 1;
  if (!possible)
    throw CheckpointError(str("loss scaler: scale ", state.scale, ", steps ", state.steps, ", last overflow ",
                              state.last_overflow, ", hysteresis ", state.hysteresis,
                              " cannot be; the file is damaged"));
  if (is_dynamic()) state_ = state;
}

}  // namespace trireme
