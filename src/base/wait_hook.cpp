#include "trireme/base/wait_hook.h"

#include <mutex>
#include <utility>

namespace trireme {
namespace {

// One per process, as the host is: what waits (a fabric, a store) is far from what knows the host.
std::mutex hook_mutex;
std::shared_ptr<WaitHook> current_hook;  // guarded by hook_mutex

std::shared_ptr<WaitHook> hook_in_force() {
  const std::lock_guard lock(hook_mutex);
  return current_hook;
}

}  // namespace

void set_wait_hook(std::shared_ptr<WaitHook> hook) {
  const std::lock_guard lock(hook_mutex);
  current_hook.swap(hook);
}

WaitScope::WaitScope() : hook_(hook_in_force()), begun_(hook_ ? hook_->begin() : nullptr) {}

}  // namespace trireme
