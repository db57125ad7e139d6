// The calls of each rank on its device, where its peers can read them: ranks that call different things are told at
// once, and nobody waits for anybody to find out.
//
// A rank writes its call, then looks what its peers have written under the same number. Of two ranks the later one
// finds the difference. Where a peer is more than kKept calls ahead its call is not there any more, and not compared.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "comm/call.h"
#include "comm/fabric/control_block.h"

namespace trireme::comm {

class CallBoard {
 public:
  /// Collective over `host`, whose ranks share memory.
  explicit CallBoard(Group& host);

  /// Throws CommError (kDiverged) that names both calls.
  void post(const Call& call);
  /// The same for a message, which `call.root` is the other end of.
  void post_message(const Call& call);

  /// Whether `peer` has come as far as this rank's `call`. True for whoever has no part in it.
  bool has_called(int peer, const Call& call) const;
  /// "rank 1 was last in all_gather #11 (…)"
  std::string last_seen(int rank) const;

 private:
  static constexpr int64_t kKept = 1024;
  static constexpr int64_t kKeptMessages = 16;

  /// Calls under consecutive numbers, from 1 on.
  template <int64_t kLength>
  struct Ring {
    alignas(kLineBytes) std::atomic<int64_t> posted;
    CallRecord calls[kLength];
    void write(const Call& call);
    /// Call `seq`, unless it has not been made yet or is overwritten.
    std::optional<Call> read(int64_t seq) const;
  };
  using CollectiveRing = Ring<kKept>;
  using MessageRing = Ring<kKeptMessages>;

  static size_t bytes_for(size_t size);
  CollectiveRing& ring(int rank) const;
  /// The messages that `owner`, this rank or its peer, has called in the direction of this rank's `message`.
  MessageRing& message_ring(const Call& message, int owner) const;
  [[noreturn]] void diverged(const Call& own, int peer, const Call& other) const;

  const GroupInfo info_;
  const std::shared_ptr<SharedMemory> memory_;
};

}  // namespace trireme::comm
