// Memory that all ranks of a mesh's shards see, in which each shows the others its gradients: it is read by all, and
// written by its own rank alone.
//
// Large gradients are born there, small ones are brought. Those of one parameter in one window are numbered from 1, by
// rounds: normally one per micro-batch. A stamp orders them over the whole run, so that nothing needs to be reset
// between windows.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "pager/gradients/gradient_arena.h"
#include "pager/gradients/mesh_context.h"
#include "trireme/comm/memory.h"

namespace trireme {

class GradientBoard {
 public:
  /// While it lives, backward passes of this thread allocate from it. Collective.
  explicit GradientBoard(const MeshContext& context);

  /// The dtype in which peers read a gradient: the parameter's, or the one that it is to travel in.
  at::ScalarType dtype(int parameter) const;

  /// All ranks have said and folded what they had: rounds begin anew.
  void begin_window() { ++window_; }
  uint64_t window() const { return window_; }

  /// Shows `gradient` of `round`, which becomes a view of this memory where it was computed elsewhere (a small one does
  /// not). All owners have folded the one before.
  void publish(int parameter, uint32_t round, at::Tensor& gradient);
  /// This rank has folded all ranks' gradients of `round` into its shard.
  void tell_folded(int parameter, uint32_t round);
  /// This rank has so many gradients in the window, by parameter.
  void announce(const std::vector<uint32_t>& rounds);

  bool has_folded(int rank, int parameter, uint32_t round) const {
    return slots_[rank][parameter].folded.load(std::memory_order_acquire) >= stamp(round);
  }
  /// [numel of the parameter], of `rank`; null: it is not here.
  void* gradient(int rank, int parameter, uint32_t round) const;
  /// Whether one that is not here may still come.
  bool may_come(int rank, int parameter, uint32_t round) const;
  /// The first rank that has not announced; nothing: all have.
  std::optional<int> awaited() const;
  /// How many rounds `parameter` has in this window, once every rank has announced.
  uint32_t rounds(int parameter) const;

 private:
  struct Slot {
    std::atomic<uint64_t> published;  // stamp of the gradient that `offset` tells of; stored last, with release order
    std::atomic<uint64_t> offset;     // into the publisher's memory
    std::atomic<uint64_t> folded;     // stamp of the last gradient that the rank has folded
    std::atomic<uint32_t> announced;  // how many gradients the rank has in the window that it has announced
  };

  uint64_t stamp(uint32_t round) const { return window_ << 20 | round; }
  void make_memory(const std::vector<size_t>& bytes);
  size_t bring(int parameter, at::Tensor& gradient) const;

  const MeshContext& context_;
  MemorySharing& sharing_;
  std::shared_ptr<SharedMemory> told_;
  std::vector<std::atomic<uint64_t>*> windows_;  // by rank: up to which it has announced; in a cache line of its own
  std::vector<Slot*> slots_;                     // by rank, then by parameter
  uint64_t window_ = 1;  // an accumulation window, or a part of one that ends with announcements

  std::vector<size_t> homes_;  // by parameter: offset of a place that only this gradient uses
  size_t home_bytes_ = 0;
  std::shared_ptr<SharedMemory> memory_;  // of each rank: the homes, then the arena
  std::shared_ptr<GradientArena> arena_;
  std::unique_ptr<ArenaScope> arena_scope_;
};

}  // namespace trireme
