// State that libtorch carries from the thread that calls backward to autograd's other threads.
#pragma once

#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

namespace trireme {

/// Its base class.
using Carried = c10::DebugInfoBase;

/// From here on `carried` goes with this thread's work, in place of what did so before; null: nothing. It lies below
/// whatever libtorch or the program has given the thread to carry: they take theirs away in the order of a stack, and a
/// profiler that is open may end at any time.
void carry(std::shared_ptr<Carried> carried);

/// The state of the thread whose work this one does; null: it carries none.
Carried* carried() noexcept;

}  // namespace trireme
