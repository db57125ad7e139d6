// One rank's side of a c10d group: its state and its wire, what it tells its peers of each call, and what it says when
// they do not answer.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/backends/c10d/wire.h"
#include "comm/group_state.h"

namespace trireme::comm {

class Link final : public GroupState {
 public:
  Link(GroupInfo group, c10::intrusive_ptr<c10d::ProcessGroup> process_group, Wire::Address address)
      : GroupState(std::move(group)), wire_(std::move(process_group), std::move(address), info().timeout) {}

  Wire& wire() { return wire_; }

  /// Tells every peer what this rank calls and hears what they call: every collective is a meeting of all ranks.
  /// Throws CommError: a peer is gone, late, has failed, or is in another call.
  void meet(const Call& call);
  /// The same for a message, from one rank to the other.
  void announce(const Call& call);
  /// A message that does not fit is taken all the same, so that its sender ends. Throws as meet().
  void expect(const Call& call);

  /// The transfers of `call`; receptions are posted first.
  struct Traffic {
    std::vector<PeerBytes> receives;
    std::vector<PeerBytes> sends;
  };
  void move(const Call& call, Channel channel, const Traffic& traffic);

  /// Names in the log the peer that `call` waits for; whether one is known.
  bool warn_of_late(const Call& call, std::chrono::steady_clock::duration waited) const;

 private:
  struct Message;
  /// Compares a peer's message with this rank's call; a message may say that there will be no such call.
  void check(const Message& message, const Call& own, int peer);
  [[noreturn]] void rethrow(const WireError& error, const Call& call);
  std::string last_seen(int peer) const;
  /// The peer that `call` waits for to make its part; -1: none.
  int awaited_by(const Call& call) const;
  void tell_peers(ErrorCode code, const std::string& cause) noexcept override;

  Wire wire_;
  std::atomic<int> awaited_in_meeting_{-1};
  mutable std::mutex mutex_;
  std::vector<std::optional<Call>> last_calls_{static_cast<size_t>(place().size)};  // guarded by mutex_
};

}  // namespace trireme::comm
