#include "comm/backends/c10d/collectives.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "comm/fabric/fold.h"
#include "comm/fabric/parts.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

// Up to here one round of messages that are longer than they need to be costs less than a second round.
constexpr int64_t kDirectBytes = 32 << 10;

using Traffic = Link::Traffic;

/// A call seen from one rank: where its bytes lie, and messages made of them. Where both are used, offsets are of the
/// whole.
class Cargo {
 public:
  Cargo(Link& link, const Request& request)
      : link_(link), request_(request), owner_(std::make_shared<Request>(request)), itemsize_(request.itemsize()) {}

  const Place& place() const { return link_.place(); }
  int64_t bytes() const { return request_.call.numel * itemsize_; }
  std::byte* output() const { return request_.out(); }
  const std::byte* input() const { return request_.in(); }

  /// The bytes of the whole that rank `rank` owns: its shard, or its block of `size` equal ones.
  ShardRange shard(int rank) const {
    const ShardRange range = shard_range(request_.call.numel, place().size, rank);
    return {range.begin * itemsize_, range.end * itemsize_};
  }
  ShardRange block(int rank) const {
    const int64_t block_bytes = bytes() / place().size;
    return {rank * block_bytes, (rank + 1) * block_bytes};
  }

  PeerBytes from_output(int peer, ShardRange range) const {
    return {peer, output() + range.begin, range.numel(), owner_};
  }
  /// A backend takes a tensor that it may write, even to send it.
  PeerBytes from_input(int peer, ShardRange range) const {
    return {peer, const_cast<std::byte*>(input()) + range.begin, range.numel(), owner_};
  }

  template <class Body>
  void for_each_peer(const Body& body) const {
    for (int peer = 0; peer < place().size; ++peer)
      if (peer != place().rank) body(peer);
  }
  void move(const Traffic& traffic) const { link_.move(request_.call, Channel::kCollectives, traffic); }

 private:
  Link& link_;
  const Request& request_;
  const std::shared_ptr<Request> owner_;  // shared with messages, which a failure may leave under way
  const int64_t itemsize_;
};

/// Receives the same number of bytes from every peer and folds them with this rank's own, in rank order.
class PeerFold {
 public:
  PeerFold(const Cargo& cargo, const std::byte* own, int64_t bytes)
      : cargo_(cargo),
        bytes_(bytes),
        staging_(std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(bytes * (cargo.place().size - 1)))) {
    for (int rank = 0; rank < cargo.place().size; ++rank)
      sources_.push_back(rank == cargo.place().rank ? own : staged(rank));
  }

  PeerBytes from(int peer) const { return {peer, staged(peer), bytes_, staging_}; }
  void fold_into(std::byte* output, const FoldKind& kind) const {
    fold(kind, output, sources_, bytes_ / static_cast<int64_t>(c10::elementSize(kind.input)));
  }

 private:
  std::byte* staged(int peer) const { return staging_.get() + lane(cargo_.place().rank, peer) * bytes_; }

  const Cargo& cargo_;
  const int64_t bytes_;
  const std::shared_ptr<std::byte[]> staging_;  // shared with messages, which a failure may leave under way
  std::vector<const std::byte*> sources_;
};

FoldKind fold_kind(const Request& request) {
  return {request.call.dtype, request.output.scalar_type(), request.call.op};
}

void reduce_directly(const Cargo& cargo, const Request& request) {
  const PeerFold parts(cargo, cargo.input(), cargo.bytes());
  Traffic traffic;
  cargo.for_each_peer([&](int peer) {
    traffic.receives.push_back(parts.from(peer));
    traffic.sends.push_back(cargo.from_input(peer, {0, cargo.bytes()}));
  });
  cargo.move(traffic);
  parts.fold_into(cargo.output(), fold_kind(request));
}

/// The fold of this rank's shard of the input, written to `target`.
void reduce_own_shard(const Cargo& cargo, const Request& request, std::byte* target) {
  const ShardRange own = cargo.shard(cargo.place().rank);
  const PeerFold parts(cargo, cargo.input() + own.begin, own.numel());
  Traffic traffic;
  cargo.for_each_peer([&](int peer) {
    traffic.receives.push_back(parts.from(peer));
    traffic.sends.push_back(cargo.from_input(peer, cargo.shard(peer)));
  });
  cargo.move(traffic);
  parts.fold_into(target, fold_kind(request));
}

/// Every rank's shard of the output, this rank's being there.
void gather_shards(const Cargo& cargo) {
  Traffic traffic;
  cargo.for_each_peer([&](int peer) {
    traffic.receives.push_back(cargo.from_output(peer, cargo.shard(peer)));
    traffic.sends.push_back(cargo.from_output(peer, cargo.shard(cargo.place().rank)));
  });
  cargo.move(traffic);
}

void run_all_reduce(Link& link, const Request& request) {
  link.meet(request.call);
  const Cargo cargo(link, request);
  if (cargo.bytes() <= kDirectBytes) return reduce_directly(cargo, request);
  reduce_own_shard(cargo, request, cargo.output() + cargo.shard(link.place().rank).begin);
  gather_shards(cargo);
}

void run_reduce_scatter(Link& link, const Request& request) {
  link.meet(request.call);
  const Cargo cargo(link, request);
  reduce_own_shard(cargo, request, cargo.output());
}

void run_all_gather(Link& link, const Request& request) {
  link.meet(request.call);
  const Cargo cargo(link, request);
  const ShardRange own = cargo.shard(link.place().rank);
  copy_bytes(cargo.output() + own.begin, cargo.input(), own.numel());
  gather_shards(cargo);
}

void run_broadcast(Link& link, const Request& request) {
  link.meet(request.call);
  const Cargo cargo(link, request);
  const ShardRange whole{0, cargo.bytes()};
  const int root = request.call.root;
  Traffic traffic;
  if (link.place().rank != root)
    traffic.receives.push_back(cargo.from_output(root, whole));
  else
    cargo.for_each_peer([&](int peer) { traffic.sends.push_back(cargo.from_output(peer, whole)); });
  cargo.move(traffic);
}

void run_all_to_all(Link& link, const Request& request) {
  link.meet(request.call);
  const Cargo cargo(link, request);
  Traffic traffic;
  cargo.for_each_peer([&](int peer) {
    traffic.receives.push_back(cargo.from_output(peer, cargo.block(peer)));
    traffic.sends.push_back(cargo.from_input(peer, cargo.block(peer)));
  });
  const ShardRange own = cargo.block(link.place().rank);
  copy_bytes(cargo.output() + own.begin, cargo.input() + own.begin, own.numel());
  cargo.move(traffic);
}

void run_gather(Link& link, const Request& request) {
  link.meet(request.call);
  const Cargo cargo(link, request);
  const ShardRange own = cargo.block(link.place().rank);
  Traffic traffic;
  if (link.place().rank == request.call.root) {
    copy_bytes(cargo.output() + own.begin, cargo.input(), own.numel());
    cargo.for_each_peer([&](int peer) { traffic.receives.push_back(cargo.from_output(peer, cargo.block(peer))); });
  } else {
    traffic.sends.push_back(cargo.from_input(request.call.root, {0, own.numel()}));
  }
  cargo.move(traffic);
}

void run_scatter(Link& link, const Request& request) {
  link.meet(request.call);
  const Cargo cargo(link, request);
  const ShardRange own = cargo.block(link.place().rank);
  Traffic traffic;
  if (link.place().rank == request.call.root) {
    copy_bytes(cargo.output(), cargo.input() + own.begin, own.numel());
    cargo.for_each_peer([&](int peer) { traffic.sends.push_back(cargo.from_input(peer, cargo.block(peer))); });
  } else {
    traffic.receives.push_back(cargo.from_output(request.call.root, {0, own.numel()}));
  }
  cargo.move(traffic);
}

void run_send(Link& link, const Request& request) {
  link.announce(request.call);
  const Cargo cargo(link, request);
  link.move(request.call, Channel::kMessages,
            {.receives = {}, .sends = {cargo.from_input(request.call.root, {0, cargo.bytes()})}});
}

void run_recv(Link& link, const Request& request) {
  link.expect(request.call);
  const Cargo cargo(link, request);
  link.move(request.call, Channel::kMessages,
            {.receives = {cargo.from_output(request.call.root, {0, cargo.bytes()})}, .sends = {}});
}

}  // namespace

void run_exchange(Link& link, const Request& request, const Records& records) {
  link.meet(request.call);
  const Place& place = link.place();
  const auto bytes = [&](int peer, int rank) {
    return PeerBytes{peer, records.data + rank * records.bytes, records.bytes, records.owner};
  };
  Traffic traffic;
  for (int peer = 0; peer < place.size; ++peer) {
    if (peer == place.rank) continue;
    traffic.receives.push_back(bytes(peer, peer));
    traffic.sends.push_back(bytes(peer, place.rank));
  }
  link.move(request.call, Channel::kCollectives, traffic);
}

void run_call(Link& link, const Request& request) {
  switch (request.call.kind) {
    case CallKind::kAllReduce:
      return run_all_reduce(link, request);
    case CallKind::kReduceScatter:
      return run_reduce_scatter(link, request);
    case CallKind::kAllGather:
      return run_all_gather(link, request);
    case CallKind::kBroadcast:
      return run_broadcast(link, request);
    case CallKind::kAllToAll:
      return run_all_to_all(link, request);
    case CallKind::kGather:
      return run_gather(link, request);
    case CallKind::kScatter:
      return run_scatter(link, request);
    case CallKind::kBarrier:
      return link.meet(request.call);
    case CallKind::kSend:
      return run_send(link, request);
    case CallKind::kRecv:
      return run_recv(link, request);
    default:
      TRIREME_CHECK(false, name_of(request.call.kind), " is no call that moves data");
  }
}

}  // namespace trireme::comm
