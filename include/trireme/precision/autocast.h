// Autocast around a forward pass.
#pragma once

#include "trireme/precision/precision.h"

namespace trireme {

/// While it lives, autocast of this thread for `device` is as `options` say (on with their dtype, or off), whatever the
/// program has set around it.
///
/// Its end empties autocast's cache of cast weights, which would otherwise outlive the next step, and the gathered
/// units that they were made from.
class [[nodiscard]] AutocastScope {
 public:
  explicit AutocastScope(const AutocastOptions& options, at::DeviceType device = at::kCPU);
  ~AutocastScope();
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

  /// Whether it is on for this thread.
  static bool is_on(at::DeviceType device = at::kCPU);

 private:
  const at::DeviceType device_;
  const bool was_on_;
  const at::ScalarType was_dtype_;
  const bool is_open_;
};

}  // namespace trireme
