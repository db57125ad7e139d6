// Backward passes and step() calls since an accumulation window opened.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>

#include "trireme/pager/pager.h"

namespace trireme {

/// The counts of one window.
class AccumulationWindow {
 public:
  /// The number of step() calls.
  int64_t micro_steps() const { return micro_steps_; }
  bool has_begun() const { return micro_steps_ != 0 || has_backward_; }
  /// The number of this rank's backward passes, by backward_from() or by a direct backward().
  int64_t passes(const GradientsSoFar& gradients) const { return std::max(backward_passes_, gradients.passes); }
  int64_t passes_since_step(const GradientsSoFar& gradients) const { return passes(gradients) - passes_at_step_; }
  /// Whether the next step() ends the window: it is number `accumulation_steps`, or set_boundary() said so.
  bool ends(int64_t accumulation_steps) const { return boundary_.value_or(micro_steps_ + 1 >= accumulation_steps); }
  /// The name of the open scope in which nothing is reduced; null: none is open.
  const char* deferral() const { return deferral_; }

  /// `goes_on`: it is a piece of a pass, and another one follows.
  void begin_pass(bool goes_on) {
    has_backward_ = true;
    if (!goes_on) ++backward_passes_;
  }
  /// Called at the beginning of step(): whether this rank had a backward pass for it, since the last step() or earlier
  /// in the window.
  bool begin_step(const GradientsSoFar& gradients) {
    const int64_t passes = this->passes(gradients);
    const bool has_gradients = std::exchange(gradients_at_step_, gradients.count) < gradients.count;
    const bool has_passes = std::exchange(passes_at_step_, passes) < passes;
    return has_gradients || has_passes || passes > micro_steps_;
  }
  void count_step() { ++micro_steps_; }
  void set_boundary(bool is_boundary) { boundary_ = is_boundary; }
  void set_deferral(const char* scope) { deferral_ = scope; }

  /// Begins another window; an open scope, and a boundary that was set, stay.
  void restart() {
    micro_steps_ = 0;
    drop_gradients();
  }
  void drop_gradients() {
    has_backward_ = false;
    backward_passes_ = passes_at_step_ = gradients_at_step_ = 0;
  }

 private:
  int64_t micro_steps_ = 0;
  bool has_backward_ = false;
  int64_t backward_passes_ = 0;    // by backward_from()
  int64_t passes_at_step_ = 0;     // before the last step()
  int64_t gradients_at_step_ = 0;  // that parameters had got before it
  std::optional<bool> boundary_ = {};
  const char* deferral_ = nullptr;
};

}  // namespace trireme
