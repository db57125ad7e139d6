// One rank's view of a group's shared memory: writing and reading steps, waiting for peers, noticing that they are
// gone.
#pragma once

#include <atomic>
#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/call.h"
#include "comm/fabric/control_block.h"
#include "comm/fabric/liveness.h"
#include "comm/memory.h"
#include "trireme/base/error.h"

namespace trireme::comm {

/// How long to poll before sleeping. A thread that works in the background must not take a core from the one that
/// computes.
enum class Patience { kCaller, kBackground };

class Fabric {
 public:
  /// Where a rank of the group was last seen in the group that it was split from; empty for a world.
  using LastSeen = std::function<std::string(int rank)>;
  /// Joins: from here on peers watch this process. `segment` has FabricLayout(size).bytes(); `info` outlives the
  /// fabric.
  Fabric(std::shared_ptr<Segment> segment, const GroupInfo& info, LastSeen last_seen_in_parent);
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  const GroupInfo& info() const { return info_; }
  const Place& place() const { return info_.place; }
  const FabricLayout& layout() const { return layout_; }

  RankControl& control(int rank) const { return *reinterpret_cast<RankControl*>(at(layout_.rank_control(rank))); }
  RankControl& own() const { return control(info_.place.rank); }
  std::byte* slot(int rank, int64_t step) const { return at(layout_.slot(rank, static_cast<int>(step % kSlots))); }
  Mailbox& mailbox(int from, int to) const { return *reinterpret_cast<Mailbox*>(at(layout_.mailbox(from, to))); }
  std::byte* mailbox_chunk(int from, int to, int64_t chunk) const {
    return at(layout_.mailbox_chunk(from, to, static_cast<int>(chunk % kMailboxChunks)));
  }

  /// Whom a wait is for (-1: anybody) and what it is for, told only when it fails.
  struct Wait {
    int peer = -1;
    Patience patience = Patience::kCaller;
    const std::function<std::string()>& what;
    const Call* call = nullptr;  ///< the collective that it is a part of, for the fix in an error
  };
  /// Returns when `ready()`. Throws CommError: a peer is gone, or the timeout has passed; StateError after cancel().
  template <class Ready>
  void wait(const Ready& ready, const Wait& wait) {
    if (ready()) return;
    if (spin(ready, wait.patience)) return;
    sleep_until([&ready] { return ready(); }, wait);
  }

  /// Wakes whoever sleeps: call after writing something that a peer may wait for.
  void notify() noexcept {
    // Pairs with the increment of `sleepers` before a sleeper's last look: either it sees our write, or we see it.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (group().sleepers.load(std::memory_order_relaxed) != 0) ring();
  }

  /// This rank ends in good order, or because of an error: peers that wait for it learn of it.
  void leave() noexcept;
  void abort(ErrorCode code, const std::string& cause) noexcept;
  /// Waits of this rank end with a StateError.
  void cancel() noexcept;

  /// Why all ranks can never meet again, told as of a wait for `what`: a peer that failed or, `with_processes`, whose
  /// process ended. Null where none did. Any thread.
  std::exception_ptr lost_peer(bool with_processes, const std::function<std::string()>& what, double elapsed_s);

  /// Names a stopped peer in the log, told as of a wait for `what`; whether there was one. Any thread.
  bool warn_of_stopped(const std::function<std::string()>& what, double elapsed_s) const;

  /// "rank 1 (pid 123)", "rank 1 (world rank 5, pid 123)"
  std::string title(int rank) const;
  /// "rank 1 was last in all_gather #11", and the same of the group that this one was split from.
  std::string last_seen(int rank) const;

 private:
  std::byte* at(size_t offset) const { return segment_->data() + offset; }
  GroupControl& group() const { return *reinterpret_cast<GroupControl*>(segment_->data()); }
  void ring() noexcept;

  template <class Ready>
  bool spin(const Ready& ready, Patience patience) const {
    const auto end = std::chrono::steady_clock::now() + (patience == Patience::kCaller ? spin_ : spin_ / 16);
    do {
      for (int look = 0; look < 32; ++look) {
        if (ready()) return true;
        __builtin_ia32_pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    return false;
  }
  void sleep_until(const std::function<bool()>& ready, const Wait& wait);
  struct Failure {
    ErrorCode code;
    std::string text;
    std::string cause;  ///< what started it, for the other ranks
    int peer = -1;      ///< who has caused it; -1: no single rank
    std::exception_ptr error() const;
  };
  /// The places to look for a reason why `wait` would never end. Looking at processes costs a system call per peer.
  enum class Look { kFlags, kProcesses };
  std::unique_ptr<Failure> find_failure(const Wait& wait, Look look, double elapsed_s);
  std::unique_ptr<Failure> failure_of(int rank, const Wait& wait, Look look, double elapsed_s);
  std::string context_of(const std::function<std::string()>& what, double elapsed_s) const;
  std::string last_seen_here(int rank) const;
  Failure timed_out(const Wait& wait, const std::string& context) const;
  /// The rank that holds up a wait for `peer`: a stopped one, or the end of the chain of ranks that wait for each
  /// other.
  int culprit(int peer) const;
  /// The first peer whose process is stopped; -1: none.
  int stopped_peer() const;
  bool process_is_dead(int rank);

  const std::shared_ptr<Segment> segment_;  // shared: pending operations may outlive the group
  const GroupInfo& info_;
  const LastSeen last_seen_in_parent_;
  const FabricLayout layout_;
  const std::chrono::nanoseconds spin_;
  std::atomic<bool> cancelled_{false};
  std::mutex watches_mutex_;
  std::vector<ProcessWatch> watches_;  // by rank, opened when first needed; guarded by watches_mutex_
};

}  // namespace trireme::comm
