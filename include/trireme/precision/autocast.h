// CPU autocast around a forward pass.
#pragma once

#include "trireme/precision/precision.h"

namespace trireme {

/// While it lives, CPU autocast of this thread is as `options` say, whatever it is around: on with their dtype, or off.
///
/// At its end autocast's cache of cast weights is empty: the cast weights of this pass would outlive the next step, and
/// the gathered units that they were made from.
class [[nodiscard]] AutocastScope {
 public:
  explicit AutocastScope(const AutocastOptions& options);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

  /// Whether CPU autocast is on for this thread.
  static bool is_on();

 private:
  const bool was_on_;
  const at::ScalarType was_dtype_;
  const bool is_open_;
};

}  // namespace trireme
