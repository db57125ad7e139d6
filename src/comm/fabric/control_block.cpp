#include "comm/fabric/control_block.h"

#include <algorithm>
#include <array>
#include <bit>

namespace trireme::comm {
namespace {

// Texts are kept as words, which peers may read while they are overwritten.
template <class Text>
using Words = std::array<int64_t, sizeof(Text) / sizeof(int64_t)>;

template <class Text>
void store(std::atomic<int64_t>* to, const Text& text) {
  const auto words = std::bit_cast<Words<Text>>(text);
  for (size_t i = 0; i < words.size(); ++i) to[i].store(words[i], std::memory_order_relaxed);
}

template <class Text>
Text load(const std::atomic<int64_t>* from) {
  Words<Text> words;
  for (size_t i = 0; i < words.size(); ++i) words[i] = from[i].load(std::memory_order_relaxed);
  return std::bit_cast<Text>(words);
}

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
  const int64_t packed = (static_cast<int64_t>(call.root) << 32) | (static_cast<int64_t>(call.device) << 24) |
                         (static_cast<int64_t>(call.kind) << 16) | (static_cast<int64_t>(call.dtype) << 8) |
                         (static_cast<int64_t>(call.is_registered) << 7) | static_cast<int64_t>(call.op);
  rest.store(packed, std::memory_order_relaxed);
  store(subject, call.subject);
  store(caller, call.caller);
}

Call CallRecord::read() const {
  const int64_t packed = rest.load(std::memory_order_relaxed);
  return {.kind = static_cast<CallKind>((packed >> 16) & 0xff),
          .dtype = static_cast<at::ScalarType>((packed >> 8) & 0xff),
          .op = static_cast<ReduceOp>(packed & 0x7f),
          .root = static_cast<int>(packed >> 32),
          .numel = numel.load(std::memory_order_relaxed),
          .seq = seq.load(std::memory_order_relaxed),
          .is_registered = ((packed >> 7) & 1) != 0,
          .device = static_cast<at::DeviceType>((packed >> 24) & 0xff),
          .subject = load<Subject>(subject),
          .caller = load<CallerName>(caller)};
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
