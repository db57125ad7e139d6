// Where an accumulation window begins and ends.
#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/stream.h"
#include "trireme/engine/engine.h"

namespace trireme {

bool Engine::is_gradient_accumulation_boundary() const {
  if (!config_.managed_gradient_accumulation) return false;  // step() is one, whenever it comes
  return window_.boundary.value_or(window_.micro_steps + 1 >= gradient_accumulation_steps());
}

void Engine::set_gradient_accumulation_boundary(bool is_boundary) {
  require_optimizer("set_gradient_accumulation_boundary");
  if (!config_.managed_gradient_accumulation)
    throw StateError(
        "set_gradient_accumulation_boundary: with managed_gradient_accumulation=false every step() ends a window; call "
        "step() where the window ends");
  window_.boundary = is_boundary;
}

void Engine::zero_grad() {
  require_alive("zero_grad");
  const CallerScope caller("zero_grad");
  if (is_host(pager_->device())) group_.barrier();  // a rank that is in another method is named here
  const Window window = pager_->close_window();
  if (optimizer_) optimizer_->refresh_masters(window.written);
  pager_->open_window();
  window_.drop_gradients();
}

void Engine::require_no_window(const char* call) const {
  if (window_.micro_steps != 0 || window_.has_backward)
    throw StateError(str(call, ": inside an accumulation window; call it after the step() that ends one"));
}

}  // namespace trireme
