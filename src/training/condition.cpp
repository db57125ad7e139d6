#include "trireme/training/condition.h"

#include "trireme/base/error.h"
#include "trireme/step/train_step.h"

namespace trireme {

void Condition::require_there(const char* call) const {
  if (is_destroyed_) refuse_destroyed(call);
}

void Condition::require_alive(const char* call) const {
  require_there(call);
  if (!failure_.empty())
    throw StateError(str(
        call,
        ": this engine is spent; make a new one with initialize(), and load a checkpoint. It ended with: ", failure_));
}

void Condition::require_intact(const char* call) const {
  require_alive(call);
  if (!torn_load_.empty())
    throw StateError(str(call,
                         ": the last load_checkpoint() ended half-way, so that weights and optimizer states are a ",
                         "mixture; load an intact checkpoint first. It ended with: ", torn_load_));
}

}  // namespace trireme
