// Freed memory that malloc keeps for later calls, and how to give it back to the system.
#pragma once

namespace trireme {

/// Gives pages of freed memory back to the system, as far as the C library can: after much was freed that will not be
/// needed again. Tens of milliseconds per GB.
void give_back_freed_memory() noexcept;

}  // namespace trireme
