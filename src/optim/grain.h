// How the update of a shard is spread over threads.
#pragma once

#include <cstdint>

namespace trireme {

constexpr int64_t kGrain = int64_t{1} << 15;  ///< elements that are worth a thread

}  // namespace trireme
