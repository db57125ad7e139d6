// Which units are updated on the host while their model trains on a device, the memory for that, and who waits for
// whom.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <vector>

#include "trireme/device/pinned_arena.h"
#include "trireme/pager/layout/layout.h"
#include "trireme/pager/layout/policy.h"

namespace trireme {

class Offload {
 public:
  /// Chooses the units by `policy`, which is in force: none where parameters are on the host.
  void decide(const Layout& layout, const PagerPolicy& policy);
  /// Page-locked memory for what was decided.
  void reserve(const Layout& layout, const PagerPolicy& policy, c10::Device device);

  /// This rank's slice of `unit` stands on the host and is updated there.
  bool owns(int unit) const { return owns_[unit]; }
  /// No device keeps this rank's shard of `unit`.
  bool keeps_shard(int unit) const { return keeps_shard_[unit]; }
  bool is_empty() const { return is_empty_; }
  PinnedArena& memory() { return memory_; }
  const PinnedArena& memory() const { return memory_; }

  /// Another thread will say that the new weights of `unit` are final.
  void expect(int unit);
  /// They are, or `problem` has kept them from it. Any thread.
  void arrive(int unit, const std::exception_ptr& problem);
  /// Blocks until nothing is expected of `unit` any more. Throws what has kept any unit from arriving.
  void await(int unit);
  void await_all();

 private:
  void await_if(const std::function<bool()>& is_there);

  bool is_empty_ = true;
  std::vector<bool> owns_, keeps_shard_;  // by unit
  PinnedArena memory_;

  std::atomic<int> expected_count_ = 0;  // where nothing is under way no lock is taken; stays above 0 after a problem
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint8_t> expected_;  // by unit
  std::exception_ptr problem_;
};

}  // namespace trireme
