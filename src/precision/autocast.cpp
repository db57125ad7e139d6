#include "trireme/precision/autocast.h"

#include <ATen/autocast_mode.h>

namespace trireme {

AutocastScope::AutocastScope(const AutocastOptions& options, at::DeviceType device)
    : device_(device),
      was_on_(is_on(device)),
      was_dtype_(at::autocast::get_autocast_dtype(device)),
      is_open_(options.enabled || was_on_) {
  if (!is_open_) return;
  at::autocast::increment_nesting();
  at::autocast::set_autocast_enabled(device, options.enabled);
  if (options.enabled) at::autocast::set_autocast_dtype(device, options.dtype);
}

AutocastScope::~AutocastScope() {
  if (!is_open_) return;
  at::autocast::decrement_nesting();
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, was_on_);
  at::autocast::set_autocast_dtype(device_, was_dtype_);
}

bool AutocastScope::is_on(at::DeviceType device) { return at::autocast::is_autocast_enabled(device); }

}  // namespace trireme
