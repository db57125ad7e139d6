// A hook that sees Trireme's errors before they pass through libtorch, which changes their type on the way to Python.
#pragma once

#include "trireme/base/error.h"

namespace trireme {

/// Called with an error that is about to leave an operator or a backward pass of the program. The hook may throw
/// another in its place: libtorch's bindings for Python turn every C++ type but their own into RuntimeError.
using ErrorHook = void (*)(const Error&);

/// Sets the hook of the whole process; nullptr, the default, is none. Thread-safe.
void set_error_hook(ErrorHook hook) noexcept;
/// Calls the hook, if there is one.
void tell_error_hook(const Error& error);

/// Calls work(), whose errors will pass through libtorch: the hook sees them first.
template <class Work>
void run_below_libtorch(const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    tell_error_hook(error);
    throw;
  }
}

}  // namespace trireme
