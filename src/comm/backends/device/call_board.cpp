#include "comm/backends/device/call_board.h"

#include "comm/backend.h"

namespace trireme::comm {

template <int64_t kLength>
void CallBoard::Ring<kLength>::write(const Call& call) {
  calls[call.seq % kLength].write(call);
  posted.store(call.seq, std::memory_order_release);
  // Pairs with the same fence of a peer: of two ranks that write at once, one at least sees the other's call.
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

template <int64_t kLength>
std::optional<Call> CallBoard::Ring<kLength>::read(int64_t seq) const {
  if (seq < 1 || posted.load(std::memory_order_acquire) < seq) return std::nullopt;
  const Call call = calls[seq % kLength].read();
  // The owner writes call seq + kLength over it before it says so.
  std::atomic_thread_fence(std::memory_order_acquire);
  if (posted.load(std::memory_order_relaxed) >= seq + kLength - 1) return std::nullopt;
  return call;
}

size_t CallBoard::bytes_for(size_t size) {
  return size * sizeof(CollectiveRing) + 2 * size * size * sizeof(MessageRing);
}

CallBoard::CallBoard(Group& host)
    : info_(host.backend().info()),
      memory_(host.memory_sharing()->share(bytes_for(static_cast<size_t>(host.size())), MemorySharing::Share::kOne)) {}

CallBoard::CollectiveRing& CallBoard::ring(int rank) const {
  return reinterpret_cast<CollectiveRing*>(memory_->of(0))[rank];
}

CallBoard::MessageRing& CallBoard::message_ring(const Call& message, int owner) const {
  const bool sends = message.kind == CallKind::kSend;
  const int from = sends ? info_.place.rank : message.root;
  const int to = sends ? message.root : info_.place.rank;
  auto* first = reinterpret_cast<MessageRing*>(reinterpret_cast<CollectiveRing*>(memory_->of(0)) + info_.place.size);
  return first[(from * info_.place.size + to) * 2 + (owner == from ? 0 : 1)];
}

void CallBoard::diverged(const Call& own, int peer, const Call& other) const {
  throw PeerError(ErrorCode::kDiverged, describe_mismatch(info_, {info_.place.rank, own}, {peer, other}), peer);
}

void CallBoard::post(const Call& call) {
  ring(info_.place.rank).write(call);
  for (int peer = 0; peer < info_.place.size; ++peer) {
    if (peer == info_.place.rank) continue;
    const auto other = ring(peer).read(call.seq);
    if (other && !other->same_as(call)) diverged(call, peer, *other);
  }
}

void CallBoard::post_message(const Call& call) {
  message_ring(call, info_.place.rank).write(call);
  const auto other = message_ring(call, call.root).read(call.seq);
  if (other && (other->numel != call.numel || other->dtype != call.dtype)) diverged(call, call.root, *other);
}

bool CallBoard::has_called(int peer, const Call& call) const {
  const bool is_message = call.kind == CallKind::kSend || call.kind == CallKind::kRecv;
  if (peer == info_.place.rank || (is_message && peer != call.root)) return true;
  const auto& posted = is_message ? message_ring(call, peer).posted : ring(peer).posted;
  return posted.load(std::memory_order_acquire) >= call.seq;
}

std::string CallBoard::last_seen(int rank) const {
  const CollectiveRing& calls = ring(rank);
  const auto last = calls.read(calls.posted.load(std::memory_order_acquire));
  return str(info_.title(rank), last ? " was last in " + describe(*last) : " has called nothing on its device");
}

}  // namespace trireme::comm
