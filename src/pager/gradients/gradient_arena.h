// Shared memory in which gradients are born: backward's own allocations of the right size are served from it, so that
// peers can read a gradient where it was computed and nothing is copied. Or memory of this rank alone, so that the next
// gradient of a size has the pages of the one before.
#pragma once

#include <c10/core/Allocator.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace trireme {

/// One rank's arena. Thread-safe: a block may be freed by any thread, also after the arena was closed.
class GradientArena : public std::enable_shared_from_this<GradientArena> {
 public:
  /// `memory` ([capacity] bytes at `base`) lives as long as the arena.
  GradientArena(std::byte* base, size_t capacity, std::shared_ptr<void> memory);

  /// Allocations of exactly `bytes`, made by a backward pass of a thread in an ArenaScope, are served from here.
  void serve(size_t bytes) { served_sizes_.insert(bytes); }
  bool serves(size_t bytes) const { return served_sizes_.contains(bytes); }

  /// A block of `bytes`, or a null pointer when the arena is full. 64-byte aligned.
  c10::DataPtr allocate(size_t bytes);
  /// Whether [data, data + bytes) lies in the arena.
  bool contains(const void* data, size_t bytes) const;
  size_t offset_of(const void* data) const { return static_cast<const std::byte*>(data) - base_; }
  std::byte* base() const { return base_; }

 private:
  friend class ArenaRegistry;
  void free(void* data);
  bool idle() const;

  std::byte* const base_;
  const size_t capacity_;
  const std::shared_ptr<void> memory_;
  std::unordered_set<size_t> served_sizes_;

  std::atomic<bool> closed_{false};  // its scope has ended

  mutable std::mutex mutex_;
  size_t used_ = 0;                                      // guarded by mutex_: blocks are cut from here on
  std::unordered_map<size_t, std::vector<void*>> free_;  // guarded by mutex_: by size
  std::unordered_map<void*, size_t> taken_;              // guarded by mutex_
};

/// Private memory: a block for each distinct one of `sizes`, bytes of gradients, that is large enough to be served.
/// Null: none is. malloc gives pages of such blocks back to the system, which clears them anew for each gradient.
std::shared_ptr<GradientArena> make_private_arena(const std::vector<size_t>& sizes);

/// While one lives, backward passes of this thread allocate from `arena`.
class [[nodiscard]] ArenaScope {
 public:
  explicit ArenaScope(std::shared_ptr<GradientArena> arena);
  ~ArenaScope();
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  std::shared_ptr<GradientArena> arena_;
};

}  // namespace trireme
