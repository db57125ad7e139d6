// Messages between pairs of ranks. Each pair and direction has its own ring in shared memory and its own order, so that
// sends and receives that cross each other do not block each other.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/fabric/fabric_state.h"
#include "trireme/base/worker.h"

namespace trireme::comm {

class MessageQueue : public std::enable_shared_from_this<MessageQueue> {
 public:
  explicit MessageQueue(std::shared_ptr<FabricState> fabric_state);

  /// `request` is a kSend or kRecv; call.root is the peer.
  std::shared_ptr<Pending<void>::Operation> submit(Request request);
  /// Ends the background thread; messages not yet complete end with a StateError. After Fabric::cancel().
  void shutdown() noexcept;

 private:
  struct Message;
  using Lock = std::unique_lock<std::mutex>;
  /// Messages with one peer in one direction; only the front one moves.
  struct Lane {
    std::deque<std::shared_ptr<Message>> messages;  // shared with Pending: either may go first
    int64_t next_seq = 1;
  };

  void complete(Message& message);
  bool done_or_hurry(Message& message) noexcept;
  bool idle() const;
  bool can_move(const Message& message) const;
  bool can_move_any() const;
  void move_all();
  void move(Message& message);
  void send_chunk(Message& message);
  void receive_chunk(Message& message);
  void fail_all(const std::exception_ptr& error);
  void want_background(const Lock& lock);
  void work();

  const std::shared_ptr<FabricState> fabric_state_;  // shared with the group and the collective queue
  const int64_t chunk_bytes_;

  std::mutex mutex_;  // guards everything below
  std::condition_variable work_;
  std::vector<Lane> lanes_;  // sends by peer, then receives by peer
  std::vector<std::shared_ptr<Message>> retired_;
  bool background_ = false;
  bool stopped_ = false;
  Worker worker_;
};

}  // namespace trireme::comm
