// A copy of what a rank saves, in one piece of memory that is kept from save to save.
#pragma once

#include <cstddef>
#include <vector>

#include "checkpoint/shard.h"

namespace trireme {

size_t bytes_of(const std::vector<SliceBytes>& slices);

class Snapshot {
 public:
  Snapshot() = default;
  ~Snapshot();
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;

  /// Allocates, and touches every page: a fault costs more than copying what it brings. Grows only.
  /// Throws    StateError naming the bytes when there is no memory.
  void reserve(size_t bytes);
  /// Copies `slices` and lets them name the copies. Requires reserve(bytes_of(slices)).
  void take(std::vector<SliceBytes>& slices);
  size_t bytes() const { return bytes_; }

 private:
  void release() noexcept;

  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace trireme
