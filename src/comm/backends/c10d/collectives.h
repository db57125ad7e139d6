// The messages of each collective over a wire, and where they are summed. Each runs in the thread of a CallQueue and
// returns when this rank's part is done.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "comm/backends/c10d/link.h"

namespace trireme::comm {

/// A collective, a barrier or a message, by the kind of `request`.
void run_call(Link& link, const Request& request);

/// One record of each rank, one after the other. `owner` keeps them alive.
struct Records {
  std::byte* data;
  int64_t bytes;  ///< of each
  std::shared_ptr<const void> owner;
};
/// With the call of `request`; this rank's record is there, the others' are received.
void run_exchange(Link& link, const Request& request, const Records& records);

}  // namespace trireme::comm
