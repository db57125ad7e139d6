#include "tests/support/fake_device/fake_nccl.h"

#include <ATen/ops/fmax.h>
#include <ATen/ops/fmin.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <stdexcept>
#include <vector>

#include "comm/fabric/fold.h"
#include "tests/support/fake_device/nccl_memory.h"
#include "trireme/base/error.h"

namespace trireme::testing {

using namespace comm;  // the types of NVIDIA's libraries

namespace {

enum class NcclKind { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce, kSend, kRecv };

struct NcclCall {
  NcclKind kind;
  const std::byte* from;
  std::byte* to;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int peer;  // or root
  // Offsets in memory that is registered; -1: it is not.
  int64_t from_place = -1;
  int64_t to_place = -1;

  bool is_registered() const { return from_place >= 0 || to_place >= 0; }
  /// NCCL's conditions, without which it does not work otherwise: see its documentation of user buffer registration.
  bool is_registered_as(const NcclCall& other) const {
    const bool gathers = kind == NcclKind::kAllGather, scatters = kind == NcclKind::kReduceScatter;
    return (from_place < 0) == (other.from_place < 0) && (to_place < 0) == (other.to_place < 0) &&
           (from_place < 0) == (to_place < 0) && (gathers || from_place == other.from_place) &&
           (scatters || to_place == other.to_place);
  }
};

/// The calls of all ranks of a communicator between one ncclGroupStart and ncclGroupEnd.
struct Meeting {
  explicit Meeting(int size) : joint(std::make_shared<FakeJoint>("nccl", size)), calls(static_cast<size_t>(size)) {}
  const std::shared_ptr<FakeJoint> joint;
  std::vector<std::vector<NcclCall>> calls;  // by rank
};

/// Ranks that have the same id.
struct Clique {
  int size = 0;
  int joined = 0;
  std::map<int64_t, std::shared_ptr<Meeting>> meetings;  // by their number
};

size_t bytes_of_type(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8:
      return 1;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    case ncclInt32:
    case ncclFloat32:
      return 4;
    default:
      return 8;
  }
}

at::ScalarType scalar_type_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
      return at::kChar;
    case ncclUint8:
      return at::kByte;
    case ncclInt32:
      return at::kInt;
    case ncclInt64:
      return at::kLong;
    case ncclFloat16:
      return at::kHalf;
    case ncclBfloat16:
      return at::kBFloat16;
    case ncclFloat64:
      return at::kDouble;
    default:
      return at::kFloat;
  }
}

ReduceOp reduce_op_of(ncclRedOp_t op) {
  if (op == ncclAvg) return ReduceOp::kMean;
  if (op == ncclMax) return ReduceOp::kMax;
  return op == ncclMin ? ReduceOp::kMin : ReduceOp::kSum;
}

/// One collective of all ranks, or the messages among them.
class Exchange {
 public:
  Exchange(const Meeting& meeting, size_t index) {
    for (const auto& calls : meeting.calls) calls_.push_back(calls.at(index));
    for (const NcclCall& call : calls_)
      if (call.kind != calls_[0].kind || call.count != calls_[0].count || call.type != calls_[0].type ||
          call.op != calls_[0].op || call.peer != calls_[0].peer)
        throw std::logic_error("fake NCCL: ranks call different things, where NCCL would hang");
      else if (!call.is_registered_as(calls_[0]))
        throw std::logic_error("fake NCCL: memory that is not registered alike, with NCCL undefined behavior");
  }

  void run() const {
    const NcclCall& first = calls_[0];
    const size_t bytes = first.count * bytes_of_type(first.type);
    switch (first.kind) {
      case NcclKind::kAllReduce: {
        const auto sums = fold_at(0, first.count);
        for (const NcclCall& call : calls_) std::memcpy(call.to, sums.data(), bytes);
        return;
      }
      case NcclKind::kReduceScatter: {
        const auto sums = fold_at(0, first.count * calls_.size());
        for (size_t rank = 0; rank < calls_.size(); ++rank)
          std::memcpy(calls_[rank].to, sums.data() + rank * bytes, bytes);
        return;
      }
      case NcclKind::kReduce: {
        const auto sums = fold_at(0, first.count);
        std::memcpy(calls_[static_cast<size_t>(first.peer)].to, sums.data(), bytes);
        return;
      }
      case NcclKind::kAllGather:
        for (const NcclCall& call : calls_)
          for (size_t rank = 0; rank < calls_.size(); ++rank)
            std::memmove(call.to + rank * bytes, calls_[rank].from, bytes);
        return;
      default:
        for (const NcclCall& call : calls_) std::memmove(call.to, calls_[static_cast<size_t>(first.peer)].from, bytes);
    }
  }

 private:
  std::vector<std::byte> fold_at(size_t begin, size_t numel) const {
    const auto dtype = scalar_type_of(calls_[0].type);
    const ReduceOp op = reduce_op_of(calls_[0].op);
    std::vector<std::byte> sums(numel * c10::elementSize(dtype));
    std::vector<const std::byte*> sources;
    for (const NcclCall& call : calls_) sources.push_back(call.from + begin);
    const bool selects = op == ReduceOp::kMax || op == ReduceOp::kMin;
    if (selects && at::isFloatingType(dtype))
      drop_nans(dtype, op, sums.data(), sources, numel);
    else
      comm::fold({dtype, dtype, op}, sums.data(), sources, static_cast<int64_t>(numel));
    return sums;
  }

  /// NCCL takes the number where one operand is a NaN and the other is a number.
  static void drop_nans(at::ScalarType dtype, ReduceOp op, std::byte* target,
                        const std::vector<const std::byte*>& sources, size_t numel) {
    const auto tensor_at = [&](const std::byte* data) {
      return at::from_blob(const_cast<std::byte*>(data), {static_cast<int64_t>(numel)}, dtype);
    };
    at::Tensor result = tensor_at(sources[0]);
    for (const std::byte* source : sources)
      result = op == ReduceOp::kMax ? at::fmax(result, tensor_at(source)) : at::fmin(result, tensor_at(source));
    tensor_at(target).copy_(result);
  }

  std::vector<NcclCall> calls_;  // by rank
};

bool is_message(const NcclCall& call) { return call.kind == NcclKind::kSend || call.kind == NcclKind::kRecv; }

void pass_messages(const Meeting& meeting) {
  const auto next = [&](size_t rank, NcclKind kind, int peer, size_t skip) -> const NcclCall& {
    for (const NcclCall& call : meeting.calls[rank])
      if (call.kind == kind && call.peer == peer && skip-- == 0) return call;
    throw std::logic_error("fake NCCL: a message without its other end, where NCCL would hang");
  };
  for (size_t rank = 0; rank < meeting.calls.size(); ++rank) {
    std::map<int, size_t> sent;  // by peer
    for (const NcclCall& call : meeting.calls[rank]) {
      if (call.kind != NcclKind::kSend) continue;
      const NcclCall& other =
          next(static_cast<size_t>(call.peer), NcclKind::kRecv, static_cast<int>(rank), sent[call.peer]++);
      if (other.count != call.count)
        throw std::logic_error("fake NCCL: a message of another length than its other end");
      if ((call.from_place < 0) != (other.to_place < 0))
        throw std::logic_error("fake NCCL: a message between memory that is registered and such that is not");
      std::memmove(other.to, call.from, call.count * bytes_of_type(call.type));
    }
  }
}

void run_meeting(const Meeting& meeting) {
  if (is_message(meeting.calls[0].at(0))) return pass_messages(meeting);
  for (size_t index = 0; index < meeting.calls[0].size(); ++index) Exchange(meeting, index).run();
}

std::mutex nccl_mutex;
std::map<int64_t, std::shared_ptr<Clique>> cliques;  // by id; guarded by nccl_mutex
std::set<ncclComm*> broken;                          // guarded by nccl_mutex
std::set<ncclComm*> all_comms;                       // guarded by nccl_mutex

/// The calls of a thread since ncclGroupStart.
struct OpenGroup {
  int depth = 0;
  std::vector<NcclCall> calls;
  ncclComm* comm = nullptr;
  cudaStream_t stream = nullptr;
};
thread_local OpenGroup group;

}  // namespace
}  // namespace trireme::testing

/// NCCL's own name for what a handle points to.
struct trireme::comm::ncclComm {
  std::shared_ptr<trireme::testing::Clique> clique;
  int rank = 0;
  int64_t next_meeting = 0;
  std::vector<std::pair<std::shared_ptr<trireme::testing::FakeJoint>, c10::Device>> joints;  // not known to be over
};

namespace trireme::testing {
namespace {

FakePart part_of(const NcclCall* begin, size_t count, const ncclComm& comm, const c10::Stream& stream) {
  FakePart part{stream, {}, {}};
  const auto size = static_cast<size_t>(comm.clique->size);
  for (const NcclCall* call = begin; call != begin + count; ++call) {
    const size_t bytes = call->count * bytes_of_type(call->type);
    const bool writes = call->kind != NcclKind::kSend && !(call->kind == NcclKind::kReduce && call->peer != comm.rank);
    const bool reads =
        call->kind != NcclKind::kRecv && !(call->kind == NcclKind::kBroadcast && call->peer != comm.rank);
    if (reads) part.reads.push_back({call->from, call->kind == NcclKind::kReduceScatter ? bytes * size : bytes});
    if (writes) part.writes.push_back({call->to, call->kind == NcclKind::kAllGather ? bytes * size : bytes});
  }
  return part;
}

void submit() {
  ncclComm& comm = *group.comm;
  const c10::Stream stream = fake_stream_of(group.stream);
  const FakePart part = part_of(group.calls.data(), group.calls.size(), comm, stream);
  std::shared_ptr<Meeting> meeting;
  {
    const std::lock_guard lock(nccl_mutex);
    auto& slot = comm.clique->meetings[comm.next_meeting++];
    if (!slot) slot = std::make_shared<Meeting>(comm.clique->size);
    meeting = slot;
    meeting->calls[static_cast<size_t>(comm.rank)] = std::move(group.calls);
    std::erase_if(comm.joints, [](const auto& joint) { return joint.first->is_done(); });
    comm.joints.emplace_back(meeting->joint, stream.device());
  }
  FakeJoint::enqueue(meeting->joint, part, [meeting] { run_meeting(*meeting); });
}

void look_up_memory(NcclCall& call, const ncclComm* comm) {
  const auto size = static_cast<size_t>(comm->clique->size);
  const size_t bytes = call.count * bytes_of_type(call.type);
  const bool scatters = call.kind == NcclKind::kReduceScatter, gathers = call.kind == NcclKind::kAllGather;
  if (call.from != nullptr) call.from_place = nccl_place_of(comm, {call.from, scatters ? bytes * size : bytes});
  if (call.to != nullptr) call.to_place = nccl_place_of(comm, {call.to, gathers ? bytes * size : bytes});
  if (scatters || gathers || call.kind == NcclKind::kAllReduce) nccl_count(call.is_registered());
}

ncclResult_t add(NcclCall call, ncclComm* comm, cudaStream_t stream) {
  look_up_memory(call, comm);
  if (group.comm != nullptr && (group.comm != comm || group.stream != stream)) return ncclInvalidUsage;
  group.comm = comm;
  group.stream = stream;
  group.calls.push_back(call);
  return group.depth > 0 ? ncclSuccess : ncclInvalidUsage;
}

ncclResult_t end_group() {
  if (--group.depth > 0) return ncclSuccess;
  if (!group.calls.empty()) submit();
  group = {};
  return ncclSuccess;
}

ncclResult_t get_unique_id(ncclUniqueId* id) {
  static std::atomic<int64_t> next{1};
  const int64_t number = next++;
  std::memcpy(id, &number, sizeof number);
  return ncclSuccess;
}

ncclResult_t init(ncclComm** comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
  if (config->blocking != 0) return ncclInvalidUsage;
  int64_t number = 0;
  std::memcpy(&number, &id, sizeof number);
  const std::lock_guard lock(nccl_mutex);
  auto& clique = cliques[number];
  if (!clique) clique = std::make_shared<Clique>();
  clique->size = size;
  ++clique->joined;
  *comm = new ncclComm{clique, rank, 0, {}};
  all_comms.insert(*comm);
  return ncclInProgress;
}

ncclResult_t get_async_error(ncclComm* comm, ncclResult_t* state) {
  const std::lock_guard lock(nccl_mutex);
  *state = comm->clique->joined < comm->clique->size ? ncclInProgress : ncclSuccess;
  if (broken.contains(comm)) *state = ncclRemoteError;
  return ncclSuccess;
}

ncclResult_t abort(ncclComm* comm) {
  const std::lock_guard lock(nccl_mutex);
  for (const auto& [joint, device] : comm->joints) FakeJoint::release(joint, device);
  all_comms.erase(comm);
  broken.erase(comm);
  nccl_forget(comm);
  delete comm;
  return ncclSuccess;
}

std::byte* bytes(void* data) { return static_cast<std::byte*>(data); }
const std::byte* bytes(const void* data) { return static_cast<const std::byte*>(data); }

comm::NcclApi make_api() {
  comm::NcclApi api{};
  api.get_version = [](int* version) { return *version = nccl_version(2, 28, 0), ncclSuccess; };
  api.get_unique_id = get_unique_id;
  api.get_error_string = [](ncclResult_t result) { return result == ncclRemoteError ? "remote error" : "an error"; };
  api.get_last_error = [](ncclComm*) { return "a peer has gone"; };
  api.comm_init_rank_config = init;
  api.comm_get_async_error = get_async_error;
  api.comm_finalize = [](ncclComm*) { return ncclSuccess; };
  api.comm_destroy = [](ncclComm* comm) { return nccl_check_unused(comm), abort(comm); };
  api.comm_abort = abort;
  api.all_reduce = [](const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm* comm,
                      cudaStream_t stream) {
    return add({NcclKind::kAllReduce, bytes(from), bytes(to), count, type, op, 0}, comm, stream);
  };
  api.reduce_scatter = [](const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm* comm,
                          cudaStream_t stream) {
    return add({NcclKind::kReduceScatter, bytes(from), bytes(to), count, type, op, 0}, comm, stream);
  };
  api.all_gather = [](const void* from, void* to, size_t count, ncclDataType_t type, ncclComm* comm,
                      cudaStream_t stream) {
    return add({NcclKind::kAllGather, bytes(from), bytes(to), count, type, ncclSum, 0}, comm, stream);
  };
  api.broadcast = [](const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm* comm,
                     cudaStream_t stream) {
    return add({NcclKind::kBroadcast, bytes(from), bytes(to), count, type, ncclSum, root}, comm, stream);
  };
  api.reduce = [](const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                  ncclComm* comm, cudaStream_t stream) {
    return add({NcclKind::kReduce, bytes(from), bytes(to), count, type, op, root}, comm, stream);
  };
  api.send = [](const void* from, size_t count, ncclDataType_t type, int peer, ncclComm* comm, cudaStream_t stream) {
    return add({NcclKind::kSend, bytes(from), nullptr, count, type, ncclSum, peer}, comm, stream);
  };
  api.recv = [](void* to, size_t count, ncclDataType_t type, int peer, ncclComm* comm, cudaStream_t stream) {
    return add({NcclKind::kRecv, nullptr, bytes(to), count, type, ncclSum, peer}, comm, stream);
  };
  api.group_start = [] { return ++group.depth, ncclSuccess; };
  api.group_end = end_group;
  return api;
}

std::atomic<bool> can_register = true;

const comm::NcclApi& fake_nccl() {
  static const comm::NcclApi old_api = make_api();
  static const comm::NcclApi api = [] {
    comm::NcclApi with_memory = old_api;
    with_memory.mem_alloc = nccl_mem_alloc;
    with_memory.mem_free = nccl_mem_free;
    with_memory.comm_register = nccl_comm_register;
    return with_memory;
  }();
  return can_register ? api : old_api;
}

}  // namespace

std::unique_ptr<Group> make_fake_nccl_group(std::unique_ptr<Group> host, c10::Device device,
                                            const NcclGroupOptions& options) {
  return comm::make_nccl_group(fake_nccl(), std::move(host), device, options);
}

void let_fake_nccl_register(bool can) { can_register = can; }

void break_fake_nccl() {
  const std::lock_guard lock(nccl_mutex);
  broken = all_comms;
}

std::unique_ptr<Group> make_fake_nccl_group(Group& host, c10::Device device, const NcclGroupOptions& options) {
  return make_fake_nccl_group(host.clone(host.name() + "." + device.str()), device, options);
}

}  // namespace trireme::testing
