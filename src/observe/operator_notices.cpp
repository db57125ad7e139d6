#include "observe/operator_notices.h"

#include <ATen/record_function.h>

#include <memory>
#include <mutex>
#include <string_view>

#include "trireme/base/notices.h"

namespace trireme {
namespace {

// Before the name of a node that autograd's engine evaluates, which is a function as operators are: it calls some.
constexpr std::string_view kOfNode = "autograd::engine::evaluate_function: ";

// The number of operators and nodes that run on this thread now, each called by the one before.
thread_local int running = 0;

struct Begun final : at::ObserverContext {
  Notice::Clock::time_point begin = Notice::Clock::now();
};

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction&) {
  return running++ > 0 ? nullptr : std::make_unique<Begun>();
}

void end(const at::RecordFunction& function, at::ObserverContext* context) {
  if (running > 0) --running;
  if (context == nullptr) return;
  std::string_view name = function.name();
  if (name.starts_with(kOfNode)) name.remove_prefix(kOfNode.size());
  tell({.kind = Notice::Kind::kOperator,
        .name = name,
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
  handle = at::addGlobalCallback(at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::FUNCTION}));
}

OperatorNotices::~OperatorNotices() {
  const std::lock_guard lock(mutex);
  if (--users == 0) at::removeCallback(handle);
}

}  // namespace trireme
