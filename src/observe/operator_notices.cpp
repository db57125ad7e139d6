#include "observe/operator_notices.h"

#include <ATen/record_function.h>

#include <memory>
#include <mutex>

#include "trireme/base/notices.h"

namespace trireme {
namespace {

using Scope = at::RecordScope;

// The number of operators that run on this thread now, each called by the one before.
thread_local int running = 0;

struct Begun final : at::ObserverContext {
  Notice::Clock::time_point begin = Notice::Clock::now();
};

bool is_operator(const at::RecordFunction& function) { return function.scope() == Scope::FUNCTION; }

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  if (is_operator(function) && running++ > 0) return nullptr;
  return std::make_unique<Begun>();
}

void end(const at::RecordFunction& function, at::ObserverContext* context) {
  if (is_operator(function) && running > 0) --running;
  if (context == nullptr) return;
  tell({.kind = Notice::Kind::kOperator,
        .name = function.name(),
        .begin = static_cast<const Begun*>(context)->begin,
        .end = Notice::Clock::now()});
}

// One callback for all that listen: ranks may be threads.
std::mutex mutex;
int users = 0;              // guarded by mutex
at::CallbackHandle handle;  // guarded by mutex

}  // namespace

OperatorNotices::OperatorNotices() {
  const std::lock_guard lock(mutex);
  if (users++ > 0) return;
  handle =
      at::addGlobalCallback(at::RecordFunctionCallback(begin, end).scopes({Scope::FUNCTION, Scope::BACKWARD_FUNCTION}));
}

OperatorNotices::~OperatorNotices() {
  const std::lock_guard lock(mutex);
  if (--users == 0) at::removeCallback(handle);
}

}  // namespace trireme
