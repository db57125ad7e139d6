#include "comm/backends/nccl/nccl_transport.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "comm/backends/device/device_fold.h"
#include "comm/backends/nccl/nccl_meeting.h"
#include "comm/backends/nccl/nccl_types.h"
#include "comm/fabric/parts.h"
#include "trireme/base/error.h"
#include "trireme/device/stream.h"

namespace trireme::comm {

/// Calls of one group, in bytes and on one stream.
class NcclTransport::Batch {
 public:
  Batch(const NcclApi& api, NcclComm& owner, ncclComm_t comm, cudaStream_t stream)
      : api_(api), owner_(owner), comm_(comm), stream_(stream) {}

  void send(const std::byte* from, int64_t bytes, int peer) const {
    if (bytes > 0) check(api_.send(from, static_cast<size_t>(bytes), ncclInt8, peer, comm_, stream_), "ncclSend");
  }
  void recv(std::byte* to, int64_t bytes, int peer) const {
    if (bytes > 0) check(api_.recv(to, static_cast<size_t>(bytes), ncclInt8, peer, comm_, stream_), "ncclRecv");
  }
  void broadcast(const std::byte* from, std::byte* to, int64_t bytes, int root) const {
    if (bytes > 0)
      check(api_.broadcast(from, to, static_cast<size_t>(bytes), ncclInt8, root, comm_, stream_), "ncclBroadcast");
  }
  void all_gather(const std::byte* from, std::byte* to, int64_t shard_bytes) const {
    check(api_.all_gather(from, to, static_cast<size_t>(shard_bytes), ncclInt8, comm_, stream_), "ncclAllGather");
  }

  struct Reduction {
    const std::byte* from;
    std::byte* to;
    int64_t numel;
    ncclDataType_t type;
    ncclRedOp_t op;
  };
  void all_reduce(const Reduction& r) const {
    check(api_.all_reduce(r.from, r.to, static_cast<size_t>(r.numel), r.type, r.op, comm_, stream_), "ncclAllReduce");
  }
  void reduce_scatter(const Reduction& r) const {
    check(api_.reduce_scatter(r.from, r.to, static_cast<size_t>(r.numel), r.type, r.op, comm_, stream_),
          "ncclReduceScatter");
  }
  void reduce(const Reduction& r, int root) const {
    if (r.numel > 0)
      check(api_.reduce(r.from, r.to, static_cast<size_t>(r.numel), r.type, r.op, root, comm_, stream_), "ncclReduce");
  }

 private:
  void check(ncclResult_t result, const char* what) const { owner_.check(result, what); }

  const NcclApi& api_;
  NcclComm& owner_;
  const ncclComm_t comm_;
  const cudaStream_t stream_;
};

NcclTransport::NcclTransport(const NcclApi& api, const NcclGroupOptions& options, const TransportSite& site)
    : api_(api),
      options_(options),
      place_(site.state.place()),
      device_(site.device),
      state_(site.state),
      host_(site.host),
      ids_(group_for_ids(site.host)),
      comm_(meet_all(api, site)) {}

template <class Body>
void NcclTransport::enqueue(NcclComm& comm, const Call& call, const Body& body) {
  const auto stream = reinterpret_cast<cudaStream_t>(current_stream(device_).native_handle());
  comm.enqueue(name_of(call.kind), [&](ncclComm_t handle) { body(Batch(api_, comm, handle, stream)); });
}

std::shared_ptr<RegisteredMemory> NcclTransport::registered() {
  const std::lock_guard lock(mutex_);
  return registered_;
}

bool NcclTransport::is_registered(const Request& request) {
  const CallKind kind = request.call.kind;
  const bool reduces = kind == CallKind::kAllReduce || kind == CallKind::kReduceScatter;
  if (kind != CallKind::kAllGather && !(reduces && reduces_natively(request))) return false;
  if (kind != CallKind::kAllReduce && request.call.numel % place_.size != 0) return false;
  const auto memory = registered();
  const auto has = [&](const at::Tensor& tensor) {
    return memory->has(static_cast<const std::byte*>(tensor.const_data_ptr()), static_cast<int64_t>(tensor.nbytes()));
  };
  return memory && has(request.input) && has(request.output);
}

NcclComm& NcclTransport::comm_of(const Request& request) {
  return request.call.is_registered ? registered()->comm() : *comm_;
}

at::Tensor NcclTransport::zeros(int64_t bytes) {
  state_.throw_if_failed();
  if (api_.comm_register == nullptr)
    throw ConfigError(
        "NCCL cannot register buffers before version 2.19; set trireme.register_buffers to false, or install a newer "
        "nvidia-nccl-cu13",
        ErrorCode::kUnsupported);
  auto memory = registered();
  // Ranks drop their tensors when they like, and must agree on when a communicator ends.
  uint8_t is_new = !memory || memory->is_idle();
  host_.all_reduce(at::from_blob(&is_new, {1}, at::kByte), ReduceOp::kMin).wait();
  if (is_new != 0) {
    wait_quietly(device_);
    if (memory) memory->comm().close();
    auto before =
        std::exchange(memory, std::make_shared<RegisteredMemory>(api_, meet_all(api_, {host_, state_, device_})));
    const std::lock_guard lock(mutex_);
    registered_ = memory;
  }
  return memory->zeros(bytes, device_);
}

void NcclTransport::collect(const Request& request) {
  switch (request.call.kind) {
    case CallKind::kAllReduce:
      return all_reduce(request);
    case CallKind::kReduceScatter:
      return reduce_scatter(request);
    case CallKind::kAllGather:
      return all_gather(request);
    case CallKind::kBroadcast:
      return broadcast(request);
    case CallKind::kAllToAll:
      return all_to_all(request);
    case CallKind::kGather:
      return gather(request);
    case CallKind::kScatter:
      return scatter(request);
    default:
      TRIREME_CHECK(false, name_of(request.call.kind), " is no collective that moves data");
  }
}

bool NcclTransport::reduces_natively(const Request& request) const {
  // NCCL's mean over one rank leaves the last elements of another output as they were (on an H200, lengths that
  // are no multiple of 16 bytes): tests/gpu/comm_test.cpp.
  if (place_.size == 1) return false;
  if (!nccl_type(request.call.dtype) || request.output.scalar_type() != request.call.dtype) return false;
  if (!c10::isFloatingType(request.call.dtype)) return true;
  // NCCL's maximum of a NaN and a number is the number.
  const bool adds = request.call.op == ReduceOp::kSum || request.call.op == ReduceOp::kMean;
  return adds && options_.sums == NcclGroupOptions::Sums::kFast;
}

void NcclTransport::all_reduce(const Request& request) {
  if (reduces_natively(request)) {
    const Batch::Reduction all{request.in(), request.out(), request.call.numel, *nccl_type(request.call.dtype),
                               nccl_op(request.call.op)};
    return enqueue(comm_of(request), request.call, [&](const Batch& batch) { batch.all_reduce(all); });
  }
  const ShardRange own = shard(request, place_.rank);
  fold_shard(request, request.output.view({-1}).slice(0, own.begin, own.end));
  enqueue(*comm_, request.call, [&](const Batch& batch) {
    gather_shards(batch, request, request.out(), request.out() + own.begin * request.itemsize());
  });
}

void NcclTransport::reduce_scatter(const Request& request) {
  if (!reduces_natively(request)) return fold_shard(request, request.output.view({-1}));
  Batch::Reduction part{request.in(), request.out(), request.call.numel / place_.size, *nccl_type(request.call.dtype),
                        nccl_op(request.call.op)};
  if (request.call.numel % place_.size == 0)
    return enqueue(comm_of(request), request.call, [&](const Batch& batch) { batch.reduce_scatter(part); });
  enqueue(*comm_, request.call, [&](const Batch& batch) {
    for (int rank = 0; rank < place_.size; ++rank) {
      const ShardRange range = shard(request, rank);
      part.from = request.in() + range.begin * request.itemsize();
      part.numel = range.numel();
      batch.reduce(part, rank);
    }
  });
}

void NcclTransport::fold_shard(const Request& request, const at::Tensor& output) {
  const ShardRange own = shard(request, place_.rank);
  const at::Tensor input = request.input.view({-1});
  const at::Tensor received = at::empty({(place_.size - 1) * own.numel()}, input.options());
  const int64_t own_bytes = own.numel() * request.itemsize();
  auto* const staged = static_cast<std::byte*>(received.data_ptr());
  enqueue(*comm_, request.call, [&](const Batch& batch) {
    for (int peer = 0; peer < place_.size; ++peer) {
      if (peer == place_.rank) continue;
      const ShardRange theirs = shard(request, peer);
      batch.send(request.in() + theirs.begin * request.itemsize(), theirs.numel() * request.itemsize(), peer);
      batch.recv(staged + comm::lane(place_.rank, peer) * own_bytes, own_bytes, peer);
    }
  });
  if (own.numel() == 0) return;
  std::vector<at::Tensor> sources;
  for (int rank = 0; rank < place_.size; ++rank)
    sources.push_back(rank == place_.rank ? input.slice(0, own.begin, own.end)
                                          : received.slice(0, comm::lane(place_.rank, rank) * own.numel(),
                                                           (comm::lane(place_.rank, rank) + 1) * own.numel()));
  fold_on_device({request.call.dtype, output.scalar_type(), request.call.op}, output, sources);
}

void NcclTransport::gather_shards(const Batch& batch, const Request& request, std::byte* output,
                                  const std::byte* own) const {
  const int64_t bytes = request.call.numel * request.itemsize();
  if (request.call.numel % place_.size == 0) return batch.all_gather(own, output, bytes / place_.size);
  for (int rank = 0; rank < place_.size; ++rank) {
    const ShardRange range = shard(request, rank);
    std::byte* const to = output + range.begin * request.itemsize();
    batch.broadcast(rank == place_.rank ? own : to, to, range.numel() * request.itemsize(), rank);
  }
}

void NcclTransport::gather_all(const std::vector<const Request*>& requests) {
  const auto is_plain = [](const Request* request) { return !request->call.is_registered; };
  const auto plain = std::ranges::find_if(requests, is_plain);
  const Request& decisive = plain == requests.end() ? *requests.front() : **plain;
  enqueue(comm_of(decisive), requests.front()->call, [&](const Batch& batch) {
    for (const Request* request : requests) gather_shards(batch, *request, request->out(), request->in());
  });
}

void NcclTransport::all_gather(const Request& request) { gather_all({&request}); }

void NcclTransport::broadcast(const Request& request) {
  const int64_t bytes = request.call.numel * request.itemsize();
  enqueue(*comm_, request.call,
          [&](const Batch& batch) { batch.broadcast(request.in(), request.out(), bytes, request.call.root); });
}

void NcclTransport::all_to_all(const Request& request) {
  const int64_t block_bytes = request.call.numel / place_.size * request.itemsize();
  enqueue(*comm_, request.call, [&](const Batch& batch) {
    for (int peer = 0; peer < place_.size; ++peer) {
      batch.send(request.in() + peer * block_bytes, block_bytes, peer);
      batch.recv(request.out() + peer * block_bytes, block_bytes, peer);
    }
  });
}

void NcclTransport::gather(const Request& request) {
  const int64_t block_bytes = request.call.numel / place_.size * request.itemsize();
  enqueue(*comm_, request.call, [&](const Batch& batch) {
    batch.send(request.in(), block_bytes, request.call.root);
    for (int peer = 0; place_.rank == request.call.root && peer < place_.size; ++peer)
      batch.recv(request.out() + peer * block_bytes, block_bytes, peer);
  });
}

void NcclTransport::scatter(const Request& request) {
  const int64_t block_bytes = request.call.numel / place_.size * request.itemsize();
  enqueue(*comm_, request.call, [&](const Batch& batch) {
    for (int peer = 0; place_.rank == request.call.root && peer < place_.size; ++peer)
      batch.send(request.in() + peer * block_bytes, block_bytes, peer);
    batch.recv(request.out(), block_bytes, request.call.root);
  });
}

void NcclTransport::pass(const Request& request) {
  const int peer = request.call.root;
  const int64_t bytes = request.call.numel * request.itemsize();
  if (request.call.kind == CallKind::kSend) {
    NcclComm& comm = lane(place_.rank, peer, request.call);
    return enqueue(comm, request.call, [&](const Batch& batch) { batch.send(request.in(), bytes, 1); });
  }
  NcclComm& comm = lane(peer, place_.rank, request.call);
  enqueue(comm, request.call, [&](const Batch& batch) { batch.recv(request.out(), bytes, 0); });
}

NcclComm& NcclTransport::lane(int from, int to, const Call& call) {
  ncclUniqueId id{};
  const bool sends = from == place_.rank;
  Pending<void> exchanged;
  {
    const std::lock_guard lock(mutex_);  // a group of the host is used by one thread at a time
    if (const auto made = lanes_.find({from, to}); made != lanes_.end()) return *made->second;
    if (sends) api_.get_unique_id(&id);
    exchanged = sends ? ids_->send(bytes_of_id(id), to) : ids_->recv(bytes_of_id(id), from);
  }
  try {
    exchanged.wait();
  } catch (const CommError&) {
    // A group that fails says why before it gives up its ids.
    const auto what = [&call] { return describe(call); };
    if (const auto lost = state_.lost_peer(GroupState::Look::kFlags, what, 0)) std::rethrow_exception(lost);
    throw;
  }
  const auto poll = [this, peers = poll_peers(state_, ids_->timeout())] {
    if (released_) throw CommError(ErrorCode::kPeerLost, "the communicator was aborted while it was being made");
    peers();
  };
  auto comm = std::make_unique<NcclComm>(api_, id, Place{sends ? 0 : 1, 2}, poll);
  const std::lock_guard lock(mutex_);
  return *(lanes_[{from, to}] = std::move(comm));
}

std::string NcclTransport::problem() noexcept {
  const std::lock_guard lock(mutex_);
  std::string text = comm_->problem();
  if (text.empty() && registered_) text = registered_->comm().problem();
  for (const auto& [ranks, comm] : lanes_)
    if (text.empty()) text = comm->problem();
  return text;
}

void NcclTransport::release() noexcept {
  released_ = true;
  ids_->abort("its device group has failed");
  comm_->abort();
  const std::lock_guard lock(mutex_);
  if (registered_) registered_->comm().abort();
  for (const auto& [ranks, comm] : lanes_) comm->abort();
}

void NcclTransport::close() noexcept {
  comm_->close();
  const std::lock_guard lock(mutex_);
  if (registered_) registered_->comm().close();
  for (const auto& [ranks, comm] : lanes_) comm->close();
}

void NcclTransport::abandon() noexcept {
  const std::lock_guard lock(mutex_);
  if (registered_) registered_->abandon();
}

}  // namespace trireme::comm
