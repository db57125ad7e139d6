// The loss scale of fp16: the factor of the loss that keeps small gradients from rounding to zero, and the rules by
// which an overflow lowers it and steps without one raise it.
#pragma once

#include <cstdint>

namespace trireme {

/// Names and defaults are those of DeepSpeed's `fp16` section.
struct LossScaleOptions {
  double loss_scale = 0;             ///< above 0: a fixed scale; 0: dynamic, by the options below
  int64_t initial_scale_power = 16;  ///< the scale begins as 2 to this power
  int64_t loss_scale_window = 1000;  ///< steps without an overflow after which the scale doubles
  /// The overflow of this number halves the scale; those before it only skip their step. Afterwards each overflow
  /// halves it, until the count restarts: when the scale doubles, or (consecutive) at the next step without an
  /// overflow.
  int64_t hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_loss_scale = 1;
  bool operator==(const LossScaleOptions&) const = default;
};

/// Throws    ConfigError: a value out of range, named.
void check_loss_scale(const LossScaleOptions& options);

/// The system whose rule a dynamic scale follows.
enum class LossScaleRule {
  kHysteresis,  ///< ZeRO's: with hysteresis; an overflow at the minimum is an error
  kClamp,       ///< FP16_Optimizer's, at ZeRO stage 0: every overflow halves, down to the minimum, where it stays
  /// smp's, at every stage: with hysteresis, down to the minimum, where it stays; a doubling comes with the step of
  /// number `loss_scale_window`, one step earlier than under the others.
  kHysteresisAndClamp,
};

/// The loss scale of an optimizer that comes later, in place of the configuration's.
struct LossScaleChoice {
  LossScaleOptions options = {};
  LossScaleRule rule = LossScaleRule::kHysteresis;
};

/// A loss scale and its state. Pure.
class LossScaler {
 public:
  /// The state in a checkpoint.
  struct State {
    double scale = 1;
    int64_t steps = 0;           ///< update() calls
    int64_t last_overflow = -1;  ///< the step (from 0) of the last overflow
    int64_t hysteresis = 1;      ///< overflows until the scale is halved
    bool operator==(const State&) const = default;
  };

  /// Throws    as check_loss_scale().
  LossScaler(const LossScaleOptions& options, LossScaleRule rule);

  double scale() const { return state_.scale; }
  bool is_dynamic() const { return options_.loss_scale == 0; }

  /// Tells whether the step that was taken with scale() overflowed, and adapts the scale.
  ///
  /// Throws    StateError, nothing changed: an overflow at the minimum, under kHysteresis.
  /// Source    step_arithmetic::follow().
  void update(bool overflow);

  /// The error of update().
  [[noreturn]] static void throw_at_minimum();

  const State& state() const { return state_; }
  /// Throws    CheckpointError: a scale that is no finite number above 0, or counts that cannot be.
  void set_state(const State& state);

 private:
  LossScaleOptions options_;
  LossScaleRule rule_;
  State state_;
};

}  // namespace trireme
