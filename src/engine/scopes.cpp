// The scopes in which nothing is reduced.
#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/engine/engine.h"

namespace trireme {

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
