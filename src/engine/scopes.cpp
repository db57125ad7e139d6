// The scopes in which nothing is reduced.
#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/engine/engine.h"

namespace trireme {

void Engine::begin_deferral(const char* call) {
  require_optimizer(call);
  if (deferral_ != nullptr) throw StateError(str(call, ": inside another ", deferral_, "() scope; one is enough"));
}

NoSync Engine::no_sync() {
  begin_deferral("no_sync");
  return NoSync(*this);
}

CoalescedReduction Engine::coalesce_grad_reduction() {
  begin_deferral("coalesce_grad_reduction");
  return CoalescedReduction(*this);
}

void Engine::defer(const char* scope) {
  deferral_ = scope;
  if (pager_) pager_->defer_reductions(scope != nullptr);
}

NoSync::NoSync(Engine& engine) : engine_(engine) { engine_.defer("no_sync"); }
NoSync::~NoSync() { engine_.defer(nullptr); }

CoalescedReduction::CoalescedReduction(Engine& engine) : engine_(engine) { engine_.defer("coalesce_grad_reduction"); }
CoalescedReduction::~CoalescedReduction() { end(); }

void CoalescedReduction::end() noexcept {
  if (open_) engine_.defer(nullptr);
  open_ = false;
}

void CoalescedReduction::close() {
  if (!open_) return;
  end();
  engine_.require_alive("coalesce_grad_reduction");
  const CallerScope caller("coalesce_grad_reduction");
  engine_.pager_->reduce_now();
}

}  // namespace trireme
