// Bytes between the ranks of one group, over send() and recv() of a c10d backend: tags, waiting, and ending a wait.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace trireme::comm {

/// The channel of a transfer. Within one channel, transfers of a pair and direction keep their order.
enum class Channel { kCalls, kCollectives, kMessageCalls, kMessages };

/// Bytes to or from a peer. `owner` keeps them alive: the backend may still hold them after a failure.
struct PeerBytes {
  int peer;
  std::byte* data;
  int64_t bytes;
  std::shared_ptr<const void> owner;
};

/// An error of a wait.
class WireError : public std::runtime_error {
 public:
  enum class Kind { kTimeout, kLost, kCancelled };
  using Duration = std::chrono::steady_clock::duration;
  WireError(Kind kind, int peer, Duration waited, const std::string& reason)
      : std::runtime_error(reason), kind_(kind), peer_(peer), waited_(waited) {}
  Kind kind() const { return kind_; }
  int peer() const { return peer_; }
  Duration waited() const { return waited_; }

 private:
  Kind kind_;
  int peer_;
  Duration waited_;
};

class Wire {
 public:
  /// `members[r]` is the rank in `process_group` of this group's rank r. Groups that share a pair of ranks have
  /// different (family, number). Throws ConfigError: there is no backend for tensors on the host.
  struct Address {
    std::vector<int> members;
    int family;  ///< of the groups that were split from one
    int number;  ///< within the family
  };
  Wire(c10::intrusive_ptr<c10d::ProcessGroup> process_group, Address address, std::chrono::milliseconds timeout);
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  /// Transfers under way; those that nobody has waited for when it goes are left to the wire, which keeps them.
  class Flight {
   public:
    explicit Flight(Wire& wire) : wire_(wire) {}
    ~Flight();
    Flight(const Flight&) = delete;
    Flight& operator=(const Flight&) = delete;
    /// Start at once and go on without the caller. Throw WireError: the backend refuses.
    void send(Channel channel, const PeerBytes& data);
    void receive(Channel channel, const PeerBytes& data);
    /// Waits for what was started and not waited for yet, in that order. Throws WireError.
    void land();
    /// Nobody will wait: what was started goes on to the end of the process, whatever becomes of the group.
    void leave() noexcept;

   private:
    friend class Wire;
    enum class Way { kSend, kReceive };
    void start(Channel channel, const PeerBytes& data, Way way);
    struct Transfer {
      int peer;
      c10::intrusive_ptr<c10d::Work> work;
    };
    Wire& wire_;
    std::vector<Transfer> transfers_;
    size_t landed_ = 0;
  };

  const Address& address() const { return address_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const { return process_group_; }
  /// Ends all waits of this rank, now and later.
  void cancel() noexcept;

 private:
  void wait(const Flight::Transfer& transfer);
  void finish(c10d::Work& work);
  int tag(Channel channel) const;

  const c10::intrusive_ptr<c10d::ProcessGroup> process_group_;
  const c10::intrusive_ptr<c10d::Backend> backend_;
  const Address address_;
  const std::chrono::milliseconds timeout_;
  const bool polls_;
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;
  std::vector<c10::intrusive_ptr<c10d::Work>> waited_for_;  // guarded by mutex_
  std::vector<c10::intrusive_ptr<c10d::Work>> left_over_;   // guarded by mutex_
};

}  // namespace trireme::comm
