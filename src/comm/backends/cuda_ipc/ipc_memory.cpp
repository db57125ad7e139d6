#include "comm/backends/cuda_ipc/ipc_memory.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <type_traits>
#include <utility>

#include "comm/backend.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

constexpr size_t kCounterBytes = 64;  // a cache line

std::atomic_ref<uint32_t> closed_count(const SharedMemory& closed, int owner) {
  return std::atomic_ref(*reinterpret_cast<uint32_t*>(closed.of(0) + kCounterBytes * static_cast<size_t>(owner)));
}

/// A part whose group is gone while peers may have it open: freed under them it would take their streams along.
struct Exported {
  const CudaApi* api;
  CUcontext context;
  CUdeviceptr part;
  std::shared_ptr<SharedMemory> closed;
  Place place;
  bool is_needed() const {
    return static_cast<int>(closed_count(*closed, place.rank).load(std::memory_order_acquire)) < place.size - 1;
  }
};

/// Kept per process, since groups go one by one and each looks after those before it. Never destroyed: the driver may
/// go before.
struct Leftovers {
  std::mutex mutex;
  std::vector<Exported> all;  // guarded by mutex
};
Leftovers& leftovers() {
  static auto* const kept = new Leftovers;
  return *kept;
}

void free_what_peers_have_closed() {
  Leftovers& kept = leftovers();
  const std::lock_guard lock(kept.mutex);
  std::erase_if(kept.all, [](const Exported& exported) {
    if (exported.is_needed()) return false;
    (void)exported.api->ctx_set_current(exported.context);
    (void)exported.api->mem_free(exported.part);
    return true;
  });
}

/// `records` [size]: this rank's is filled in, the others' are received.
template <class Record>
void exchange(Group& host, std::vector<Record>& records) {
  static_assert(std::is_trivially_copyable_v<Record>);
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Record));
  const at::Tensor all = at::from_blob(records.data(), {kBytes * host.size()}, at::kByte);
  host.all_gather(all, all.slice(0, kBytes * host.rank(), kBytes * (host.rank() + 1))).wait();
}

}  // namespace

struct IpcMemory::Offer {
  int64_t process = 0;
  CUdeviceptr part = 0;
  CUipcMemHandle handle{};
};

IpcMemory::IpcMemory(const CudaApi& api, CUcontext context, Group& host, size_t bytes)
    : api_(api),
      context_(context),
      info_(host.backend().info()),
      closed_(
          host.memory_sharing()->share(kCounterBytes * static_cast<size_t>(host.size()), MemorySharing::Share::kOne)),
      parts_(static_cast<size_t>(host.size())) {
  free_what_peers_have_closed();
  try {
    allocate(host, bytes);
  } catch (...) {
    give_back();
    throw;
  }
}

void IpcMemory::allocate(Group& host, size_t bytes) {
  const auto self = static_cast<size_t>(info_.place.rank);
  std::vector<Offer> offers(parts_.size());
  // A rank that fails must still meet its peers, or they would wait for it in vain.
  std::string problem;
  try {
    check_cuda(api_, api_.mem_alloc(&parts_[self], bytes), "cuMemAlloc");
    offers[self].process = api_.process_id();
    offers[self].part = parts_[self];
    check_cuda(api_, api_.ipc_get_mem_handle(&offers[self].handle, parts_[self]), "cuIpcGetMemHandle");
  } catch (const CommError& error) {
    problem = str(error.what(), ", for ", bytes, " bytes");
  }
  exchange(host, offers);
  agree(host, problem);
  try {
    open(offers);
  } catch (const CommError& error) {
    problem = error.what();
  }
  agree(host, problem);
}

void IpcMemory::open(const std::vector<Offer>& offers) {
  for (int rank = 0; rank < info_.place.size; ++rank) {
    const Offer& offer = offers[static_cast<size_t>(rank)];
    auto& part = parts_[static_cast<size_t>(rank)];
    if (rank == info_.place.rank) continue;
    if (offer.process == api_.process_id()) {  // a thread beside this one: its pointer serves
      part = offer.part;
      continue;
    }
    check_cuda(api_, api_.ipc_open_mem_handle(&part, offer.handle, kIpcMemLazyEnablePeerAccess), "cuIpcOpenMemHandle");
    opened_.push_back(rank);
  }
}

void IpcMemory::agree(Group& host, const std::string& problem) const {
  std::vector<int64_t> failed(parts_.size());
  failed[static_cast<size_t>(info_.place.rank)] = problem.empty() ? 0 : 1;
  exchange(host, failed);
  for (size_t rank = 0; rank < failed.size(); ++rank)
    if (failed[rank] != 0)
      throw ConfigError(str(
          info_.title(static_cast<int>(rank)), " of group '", info_.name, "' cannot share GPU memory with its peers: ",
          static_cast<int>(rank) == info_.place.rank ? problem : "see its own error",
          ". All ranks must run on one host, on GPUs with peer access to each other or on one, and see "
          "them in one container; NCCL (make_nccl_group()) serves others"));
}

IpcMemory::~IpcMemory() { give_back(); }

void IpcMemory::give_back() noexcept {
  (void)api_.ctx_set_current(context_);
  for (const int rank : opened_) (void)api_.ipc_close_mem_handle(parts_[static_cast<size_t>(rank)]);
  for (int rank = 0; rank < info_.place.size; ++rank)
    if (rank != info_.place.rank) closed_count(*closed_, rank).fetch_add(1, std::memory_order_acq_rel);
  if (const CUdeviceptr part = parts_[static_cast<size_t>(info_.place.rank)]; part != 0) {
    const std::lock_guard lock(leftovers().mutex);
    leftovers().all.push_back({&api_, context_, part, closed_, info_.place});
  }
  free_what_peers_have_closed();
}

}  // namespace trireme::comm
