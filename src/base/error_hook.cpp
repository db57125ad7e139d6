#include "trireme/base/error_hook.h"

#include <atomic>

namespace trireme {
namespace {

// One per process, as the host is: an operator of the program is far from what knows the host.
std::atomic<ErrorHook> current_error_hook = nullptr;

}  // namespace

void set_error_hook(ErrorHook hook) noexcept { current_error_hook.store(hook, std::memory_order_release); }

void tell_error_hook(const Error& error) {
  if (const ErrorHook hook = current_error_hook.load(std::memory_order_acquire)) hook(error);
}

}  // namespace trireme
