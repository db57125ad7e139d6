// Errors of ours that pass through libtorch on their way to the program.
#pragma once

#include "trireme/base/error.h"

namespace trireme {

/// Told of an error that is about to leave an operator or a backward pass of the program. It may throw another in its
/// place: Python's bindings of libtorch turn every C++ type but their own into RuntimeError.
using ErrorHook = void (*)(const Error&);

/// For the whole process; nullptr for none, as at first. Thread-safe.
void set_error_hook(ErrorHook hook) noexcept;
/// Calls the hook, if there is one.
void tell_error_hook(const Error& error);

/// work(), whose errors go through libtorch.
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
