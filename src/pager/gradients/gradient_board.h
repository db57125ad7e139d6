// Boards in shared memory on which ranks tell each other about gradients: one per rank, written by it alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "trireme/comm/memory.h"

namespace trireme {

/// Gradients of one parameter in one window are numbered from 1: normally one per micro-batch. A stamp orders them over
/// the whole run, so that nothing needs to be reset between windows.
constexpr uint64_t stamp(uint64_t window, uint32_t round) { return window << 20 | round; }

class GradientBoard {
 public:
  /// Collective.
  GradientBoard(MemorySharing& sharing, int parameters);

  struct Slot {
    std::atomic<uint64_t> published;  ///< stamp of the gradient that `offset` tells of; stored last, with release order
    std::atomic<uint64_t> offset;     ///< into the publisher's arena
  };

  Slot& slot(int rank, int parameter) const { return reinterpret_cast<Slot*>(of(rank) + kHeader)[parameter]; }
  /// Stamp of the last gradient of `parameter` that `rank` has folded into its shard.
  std::atomic<uint64_t>& folded(int rank, int parameter) const {
    return reinterpret_cast<std::atomic<uint64_t>*>(of(rank) + folded_begin_)[parameter];
  }
  /// How many gradients of `parameter` `rank` has in the window; valid once announced_window says so.
  std::atomic<uint32_t>& announced(int rank, int parameter) const {
    return reinterpret_cast<std::atomic<uint32_t>*>(of(rank) + announced_begin_)[parameter];
  }
  std::atomic<uint64_t>& announced_window(int rank) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(of(rank));
  }

 private:
  static constexpr size_t kHeader = 64;  // announced_window has a cache line to itself: everybody polls it
  std::byte* of(int rank) const { return memory_->of(rank); }

  size_t folded_begin_;
  size_t announced_begin_;
  std::shared_ptr<SharedMemory> memory_;
};

}  // namespace trireme
