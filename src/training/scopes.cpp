#include "trireme/training/scopes.h"

#include "trireme/comm/call_scopes.h"
#include "trireme/training/training.h"

namespace trireme {

NoSync::NoSync(Training& training) : training_(training) {
  training_.condition().require_there("no_sync");
  training_.step().defer("no_sync");
}
NoSync::~NoSync() { training_.step().defer(nullptr); }

CoalescedReduction::CoalescedReduction(Training& training) : training_(training) {
  training_.condition().require_there("coalesce_grad_reduction");
  training_.step().defer("coalesce_grad_reduction");
}
CoalescedReduction::~CoalescedReduction() { end(); }

void CoalescedReduction::end() noexcept {
  if (open_) training_.step().defer(nullptr);
  open_ = false;
}

void CoalescedReduction::close() {
  if (!open_) return;
  end();
  training_.condition().require_alive("coalesce_grad_reduction");
  const CallerScope caller("coalesce_grad_reduction");
  training_.pager().reduce_now();
}

}  // namespace trireme
