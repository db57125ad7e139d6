// A rank's state of a group, whatever moves the data: who it is, what was called, and the first error, after which
// the group is dead and peers are told.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "comm/call.h"
#include "comm/flight_recorder.h"
#include "trireme/base/error.h"
#include "trireme/base/wait_hook.h"

namespace trireme::comm {

class GroupState {
 public:
  explicit GroupState(GroupInfo info);
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  const GroupInfo& info() const { return info_; }
  const Place& place() const { return info_.place; }
  const std::string& name() const { return info_.name; }
  std::string title(int rank) const { return info_.title(rank); }
  /// That of this rank.
  std::string own_title() const { return title(place().rank); }
  FlightRecorder& recorder() { return recorder_; }
  std::vector<CallUnderWay> calls_under_way() const { return recorder_.under_way(); }

  /// Throws the first error of this group, if there was one; StateError in a process that was forked from the rank's.
  void throw_if_failed() const {
    if (failed_.load(std::memory_order_acquire)) throw_failure();
    if (is_forked()) throw_forked();
  }
  /// Whether this process was forked from the one that joined. It has a copy of the group, but is no rank: what it does
  /// must not reach the peers, and the group's threads and locks are not usable in it.
  bool is_forked() const noexcept { return process_ != ::getpid(); }
  /// Marks the group dead here and tells peers, unless `error` is a StateError: of a group that was destroyed under a
  /// wait, whose destructor tells them. The first one counts.
  void fail(const std::exception_ptr& error) noexcept;
  /// The same for a reason that is no error of a call.
  void abort(const std::string& reason) noexcept;
  /// Checks a wait for the group: peers are told of an interruption.
  void poll(const WaitScope& host);
  /// The error of a call that the group's end overtook.
  std::exception_ptr destroyed_before(const Call& call) const;

  void count(int64_t calls, int64_t bytes_sent) noexcept {
    calls_.fetch_add(calls, std::memory_order_relaxed);
    bytes_.fetch_add(bytes_sent, std::memory_order_relaxed);
  }
  CommCounters counters() const noexcept { return {calls_.load(), bytes_.load()}; }
  bool has_failed() const noexcept { return failed_.load(std::memory_order_acquire); }

  // For a backend above this one, whose own waits are not on the host. Any thread. Where ranks share no memory nothing
  // is known of peers.
  enum class Look { kFlags, kProcesses };  ///< to look at the processes costs a system call per peer
  /// Why all ranks can never meet again: a peer that failed, or whose process ended. `what` rank `place().rank` was in.
  virtual std::exception_ptr lost_peer(Look, const std::function<std::string()>& /*what*/, double /*elapsed_s*/) {
    return nullptr;
  }
  /// Names in the log a peer whose process is stopped while this rank waits in `what`; whether there was one.
  virtual bool warn_of_stopped(const std::function<std::string()>& /*what*/, double /*elapsed_s*/) { return false; }
  /// Whether the other ranks are there: those of a fake group are not.
  virtual bool has_peers() const { return true; }
  /// Whether `peer` destroyed its group in good order.
  virtual bool has_left(int /*peer*/) const { return false; }

 protected:
  ~GroupState();

 private:
  /// Ends the waits of this rank and, as well as it can, those of its peers.
  virtual void tell_peers(ErrorCode code, const std::string& cause) noexcept = 0;
  /// False: the group was dead already. Peers are told the `cause`.
  bool record_failure(const CommError& error, const std::string& cause) noexcept;
  bool remember_failure(const CommError& error) noexcept;
  [[noreturn]] void throw_failure() const;
  [[noreturn]] void throw_forked() const;

  const pid_t process_ = ::getpid();
  const GroupInfo info_;
  FlightRecorder recorder_;
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> bytes_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  std::optional<CommError> failure_;  // guarded by mutex_
};

/// Keeps what `owners` own for ever. In a forked process the owners' locks may be held by threads that are not there,
/// so that destructors would wait for them for ever.
template <class... Owner>
void abandon(Owner&... owners) {
  (static_cast<void>(new Owner(std::move(owners))), ...);
}

/// A CommError that a rank of the group has caused: it died, left, failed, did not arrive or called something else.
class PeerError : public CommError {
 public:
  /// `cause`: the text of the first cause, for the other ranks, where the peer has relayed it.
  PeerError(ErrorCode code, const std::string& message, int peer, std::string cause = {})
      : CommError(code, message), peer_(peer), cause_(cause.empty() ? message : std::move(cause)) {}
  int peer() const noexcept { return peer_; }
  const std::string& cause() const noexcept { return cause_; }

 private:
  int peer_;
  std::string cause_;
};

}  // namespace trireme::comm
