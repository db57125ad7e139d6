// How much a pager holds, and how often it moved something.
#pragma once

#include <cstdint>

namespace trireme {

/// Model-state bytes that this rank holds now; memory that N ranks share counts 1/N.
struct PagerMemory {
  int64_t weight_bytes = 0;     ///< parameters that stay (shards, or whole ones at ZeRO stages 0-2)
  int64_t gradient_bytes = 0;   ///< accumulated gradients
  int64_t padding_bytes = 0;    ///< of the two above, what is alignment
  int64_t live_bytes = 0;       ///< gathered units now
  int64_t peak_live_bytes = 0;  ///< most that live_bytes ever was
  int64_t in_flight_bytes = 0;  ///< gradients between backward and their reduction
  int64_t peak_in_flight_bytes = 0;
  int64_t deferred_bytes = 0;   ///< gradients summed on this rank alone (defer_reductions)
  int64_t offloaded_bytes = 0;  ///< page-locked memory of the host
  /// With register_buffers: device memory that libtorch's allocator does not count. Some of the above is in it.
  int64_t registered_bytes = 0;
};

/// Counts since the pager was made.
struct PagerCounters {
  int64_t gathers = 0;     ///< units made whole
  int64_t prefetches = 0;  ///< of these, started ahead of their use
  int64_t releases = 0;
  int64_t reductions = 0;     ///< gradient reductions, per parameter or per unit
  int64_t reduced_bytes = 0;  ///< of gradients that this rank gave to them
};

}  // namespace trireme
