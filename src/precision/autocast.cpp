#include "trireme/precision/autocast.h"

#include <ATen/autocast_mode.h>

namespace trireme {

AutocastScope::AutocastScope(const AutocastOptions& options)
    : was_on_(is_on()), was_dtype_(at::autocast::get_autocast_dtype(at::kCPU)), is_open_(options.enabled || was_on_) {
  if (!is_open_) return;
  at::autocast::increment_nesting();
  at::autocast::set_autocast_enabled(at::kCPU, options.enabled);
  if (options.enabled) at::autocast::set_autocast_dtype(at::kCPU, options.dtype);
}

AutocastScope::~AutocastScope() {
  if (!is_open_) return;
  at::autocast::decrement_nesting();
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, was_on_);
  at::autocast::set_autocast_dtype(at::kCPU, was_dtype_);
}

bool AutocastScope::is_on() { return at::autocast::is_autocast_enabled(at::kCPU); }

}  // namespace trireme
