#include "comm/fabric/control_block.h"

#include <algorithm>
#include <array>
#include <bit>

namespace trireme::comm {
namespace {

using CallerWords = std::array<int64_t, sizeof(CallerName) / sizeof(int64_t)>;

constexpr size_t kPageBytes = 4096;
size_t up_to_page(size_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

// A pair's ring shrinks with the number of pairs: N ranks have N*N of them.
constexpr int64_t kMailboxBudgetBytes = 1 << 20;
constexpr int64_t kMaxMailboxChunkBytes = 64 << 10;
constexpr int64_t kMinMailboxChunkBytes = 4 << 10;

}  // namespace

static_assert(std::atomic<int64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);

void CallRecord::write(const Call& call) {
  seq.store(call.seq, std::memory_order_relaxed);
  numel.store(call.numel, std::memory_order_relaxed);
  const int64_t packed = (static_cast<int64_t>(call.root) << 32) | (static_cast<int64_t>(call.kind) << 16) |
                         (static_cast<int64_t>(call.dtype) << 8) | static_cast<int64_t>(call.op);
  rest.store(packed, std::memory_order_relaxed);
  const auto words = std::bit_cast<CallerWords>(call.caller);
  for (size_t i = 0; i < words.size(); ++i) caller[i].store(words[i], std::memory_order_relaxed);
}

Call CallRecord::read() const {
  const int64_t packed = rest.load(std::memory_order_relaxed);
  CallerWords words;
  for (size_t i = 0; i < words.size(); ++i) words[i] = caller[i].load(std::memory_order_relaxed);
  return {.kind = static_cast<CallKind>((packed >> 16) & 0xff),
          .dtype = static_cast<at::ScalarType>((packed >> 8) & 0xff),
          .op = static_cast<ReduceOp>(packed & 0xff),
          .root = static_cast<int>(packed >> 32),
          .numel = numel.load(std::memory_order_relaxed),
          .seq = seq.load(std::memory_order_relaxed),
          .caller = std::bit_cast<CallerName>(words)};
}

FabricLayout::FabricLayout(int size) : size_(size) {
  const int64_t share = kMailboxBudgetBytes / (size * kMailboxChunks) / kMinMailboxChunkBytes * kMinMailboxChunkBytes;
  mailbox_chunk_bytes_ = std::clamp(share, kMinMailboxChunkBytes, kMaxMailboxChunkBytes);
  const size_t ranks = static_cast<size_t>(size);
  ranks_ = up_to_page(sizeof(GroupControl));
  slots_ = up_to_page(ranks_ + sizeof(RankControl) * ranks);
  mailboxes_ = slots_ + static_cast<size_t>(kSlotBytes) * ranks * kSlots;
  chunks_ = up_to_page(mailboxes_ + sizeof(Mailbox) * ranks * ranks);
  bytes_ = chunks_ + static_cast<size_t>(mailbox_chunk_bytes_) * ranks * ranks * kMailboxChunks;
}

}  // namespace trireme::comm
