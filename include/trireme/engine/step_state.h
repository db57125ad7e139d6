// Where an engine stands between two steps.
#pragma once

#include <cstdint>
#include <optional>

namespace trireme {

/// Since the accumulation window opened.
struct WindowState {
  int64_t micro_steps = 0;            ///< step() calls
  bool has_backward = false;          ///< the window holds gradients
  int64_t backward_passes = 0;        ///< backward() calls
  int64_t passes_at_step = 0;         ///< backward passes, direct ones included, before the last step()
  int64_t gradients_at_step = 0;      ///< gradients that parameters had got before it
  std::optional<bool> boundary = {};  ///< whether the next step() ends it, where the user has said so
  const char* deferral = nullptr;     ///< the scope in which nothing is reduced

  /// Another one opens; scopes and what the user said of its end stay.
  void restart() {
    micro_steps = 0;
    drop_gradients();
  }
  void drop_gradients() {
    has_backward = false;
    backward_passes = passes_at_step = gradients_at_step = 0;
  }
};

/// How the last step ended.
struct StepOutcome {
  std::optional<double> norm = {};  ///< before clipping; -1 if not finite
  bool applied = false;
  /// False: a device has not been asked yet. Then this, the skipped steps and the loss scale are of an earlier step.
  bool is_known = true;
  int64_t applied_steps = 0;  ///< so far, by a device's count when it was last known
  bool at_minimum = false;    ///< an overflow at the smallest loss scale was seen; the next step throws
};

}  // namespace trireme
