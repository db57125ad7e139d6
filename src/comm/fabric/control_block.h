// The block of shared memory that the ranks of one group write. docs/comm.md, "Protocol", explains it.
//
// Every collective is a sequence of steps; steps are numbered through the group's life, in the same way on every rank.
// In a step a rank may write one slot (`posted`), then reads slots of its peers (`done`). Step t uses slot t % kSlots,
// so it may be written once every peer is done with step t - kSlots. All zeros is the valid initial state.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "comm/call.h"

namespace trireme::comm {

constexpr size_t kLineBytes = 64;
constexpr int kSlots = 2;
/// Two slots stay in a core's second-level cache. Measured in benchmarks/comm_bench.cpp.
constexpr int64_t kSlotBytes = 512 << 10;
/// A rank can be at most one collective ahead of a peer that still reads its record.
constexpr int kCallRecords = 4;
constexpr size_t kCauseBytes = 1024;

enum class RankState : uint32_t {
  kAbsent = 0,  ///< has not joined yet
  kAlive,
  kLeft,     ///< destroyed its group in good order
  kAborted,  ///< failed; `cause` says why
};

/// A Call that peers may read while it is overwritten (only to describe it; the comparison reads stable ones).
struct alignas(kLineBytes) CallRecord {
  std::atomic<int64_t> seq;
  std::atomic<int64_t> numel;
  std::atomic<int64_t> rest;  ///< device, kind, dtype, op, root: one byte each, root in the upper half
  std::atomic<int64_t> subject[sizeof(Subject) / sizeof(int64_t)];
  std::atomic<int64_t> caller[sizeof(CallerName) / sizeof(int64_t)];

  void write(const Call& call);
  Call read() const;
};

struct RankControl {
  alignas(kLineBytes) std::atomic<int64_t> posted;   ///< steps that this rank has written
  alignas(kLineBytes) std::atomic<int64_t> done;     ///< steps whose slots this rank needs no more
  alignas(kLineBytes) std::atomic<int64_t> started;  ///< sequence number of the last collective begun
  std::atomic<int64_t> finished;                     ///< and ended
  std::atomic<int64_t> waits_for;                    ///< rank + 1 that this one sleeps for; 0: none. Only for errors
  CallRecord calls[kCallRecords];                    ///< call `seq` is in calls[seq % kCallRecords]
  alignas(kLineBytes) std::atomic<RankState> state;
  int32_t cause_code;  ///< ErrorCode; valid with kAborted
  std::atomic<int64_t> pid;
  int64_t start_time;  ///< of the process, so that a reused pid is not taken for it
  char cause[kCauseBytes];
};

struct GroupControl {
  alignas(kLineBytes) std::atomic<uint32_t> bell;      ///< futex: changes when somebody may have to wake
  alignas(kLineBytes) std::atomic<uint32_t> sleepers;  ///< threads that sleep, or are about to
};

// Messages between a pair of ranks go through a ring of chunks, apart from the steps.
constexpr int kMailboxChunks = 4;

struct alignas(kLineBytes) MessageRecord {
  std::atomic<int64_t> seq;
  std::atomic<int64_t> numel;
  std::atomic<int64_t> dtype;
};

struct Mailbox {
  alignas(kLineBytes) std::atomic<int64_t> sent;   ///< chunks written by the sender
  alignas(kLineBytes) std::atomic<int64_t> taken;  ///< chunks read by the receiver
  MessageRecord chunks[kMailboxChunks];            ///< the message that a chunk belongs to
};

/// Where things lie in a group's segment.
class FabricLayout {
 public:
  explicit FabricLayout(int size);
  size_t bytes() const { return bytes_; }
  int64_t mailbox_chunk_bytes() const { return mailbox_chunk_bytes_; }
  size_t rank_control(int rank) const { return ranks_ + sizeof(RankControl) * rank; }
  size_t slot(int rank, int slot) const { return slots_ + static_cast<size_t>(kSlotBytes) * (rank * kSlots + slot); }
  size_t mailbox(int from, int to) const { return mailboxes_ + sizeof(Mailbox) * (from * size_ + to); }
  size_t mailbox_chunk(int from, int to, int chunk) const {
    return chunks_ + static_cast<size_t>(mailbox_chunk_bytes_) * ((from * size_ + to) * kMailboxChunks + chunk);
  }

 private:
  int size_;
  int64_t mailbox_chunk_bytes_;
  size_t ranks_, slots_, mailboxes_, chunks_, bytes_;
};

}  // namespace trireme::comm
