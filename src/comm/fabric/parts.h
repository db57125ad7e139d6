// How elements are cut into parts (one per rank) and the parts into chunks (one per step).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "comm/fabric/control_block.h"
#include "trireme/comm/group.h"

namespace trireme::comm {

/// Nothing to do for an empty range (its pointers may be null) or in place.
inline void copy_bytes(std::byte* to, const std::byte* from, int64_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(bytes));
}

struct PartOptions {
  int64_t numel;     ///< of the longest part
  int64_t itemsize;  ///< in bytes
  int64_t lanes;     ///< chunks that share a slot
};

/// The chunk of every part that one step moves.
class Parts {
 public:
  Parts(const PartOptions& options, int64_t slot_bytes)
      : part_numel_(options.numel),
        itemsize_(options.itemsize),
        lane_bytes_(std::max<int64_t>(slot_bytes / std::max<int64_t>(options.lanes, 1) / kAlign * kAlign, kAlign)),
        chunk_numel_(lane_bytes_ / itemsize_) {}

  int64_t steps() const { return std::max<int64_t>(1, (part_numel_ + chunk_numel_ - 1) / chunk_numel_); }
  /// Elements of `part` that step `step` moves.
  ShardRange chunk(ShardRange part, int64_t step) const {
    const int64_t begin = std::min(part.begin + step * chunk_numel_, part.end);
    return {begin, std::min(begin + chunk_numel_, part.end)};
  }
  int64_t lane_bytes() const { return lane_bytes_; }
  int64_t bytes(ShardRange range) const { return range.numel() * itemsize_; }
  int64_t offset(ShardRange range) const { return range.begin * itemsize_; }

 private:
  static constexpr int64_t kAlign = kLineBytes;
  int64_t part_numel_;
  int64_t itemsize_;
  int64_t lane_bytes_;
  int64_t chunk_numel_;
};

/// The lane in `owner`'s slot that holds what is meant for `reader`: nobody needs a lane for itself.
constexpr int64_t lane(int owner, int reader) { return reader < owner ? reader : reader - 1; }

}  // namespace trireme::comm
