#include "comm/backends/cuda_ipc/ipc_flags.h"

#include <map>
#include <mutex>

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

constexpr size_t kFlagBytes = 64;  // a cache line, since each is written by another GPU

size_t flags_per_rank(int size) { return 2 + 2 * static_cast<size_t>(size); }

/// Ranks that are threads may have one address for the memory that they share, and the driver takes an address once.
struct Registrations {
  std::mutex mutex;
  std::map<void*, int> users;  // guarded by mutex
};
Registrations& registrations() {
  static auto* const all = new Registrations;
  return *all;
}

void register_memory(const CudaApi& api, void* data, size_t bytes) {
  Registrations& all = registrations();
  const std::lock_guard lock(all.mutex);
  if (all.users[data] == 0)
    check_cuda(api, api.mem_host_register(data, bytes, kMemHostRegisterPortable | kMemHostRegisterDeviceMap),
               "cuMemHostRegister");
  ++all.users[data];
}

void unregister_memory(const CudaApi& api, void* data) noexcept {
  Registrations& all = registrations();
  const std::lock_guard lock(all.mutex);
  if (--all.users[data] > 0) return;
  all.users.erase(data);
  (void)api.mem_host_unregister(data);
}

}  // namespace

IpcFlags::IpcFlags(const CudaApi& api, CUstream probe, Group& host)
    : api_(api),
      place_{host.rank(), host.size()},
      memory_(host.memory_sharing()->share(kFlagBytes * flags_per_rank(host.size()) * static_cast<size_t>(host.size()),
                                           MemorySharing::Share::kOne)) {
  register_memory(api_, memory_->of(0), memory_->bytes());
  try {
    check_cuda(api_, api_.mem_host_get_device_pointer(&address_, memory_->of(0), 0), "cuMemHostGetDevicePointer");
    const Flag own{.owner = place_.rank, .kind = Flag::kPosted};
    write(probe, own, 0);
    wait(probe, own, 0);
  } catch (const CommError& error) {
    unregister_memory(api_, memory_->of(0));
    throw ConfigError(str("the streams of this GPU cannot wait for memory: ", error.what(),
                          "; ranks with a GPU each can use NCCL (make_nccl_group())"));
  }
}

IpcFlags::~IpcFlags() { unregister_memory(api_, memory_->of(0)); }

size_t IpcFlags::offset(const Flag& flag) const {
  const auto size = static_cast<size_t>(place_.size);
  const auto peer = static_cast<size_t>(flag.peer);
  auto index = static_cast<size_t>(flag.kind);
  if (flag.kind == Flag::kSent) index = 2 + peer;
  if (flag.kind == Flag::kTaken) index = 2 + size + peer;
  return kFlagBytes * (static_cast<size_t>(flag.owner) * flags_per_rank(place_.size) + index);
}

void IpcFlags::wait(CUstream stream, const Flag& flag, int64_t value) const {
  check_cuda(
      api_,
      api_.stream_wait_value32(stream, address_ + offset(flag), static_cast<uint32_t>(value), kStreamWaitValueGeq),
      "cuStreamWaitValue32");
}

void IpcFlags::write(CUstream stream, const Flag& flag, int64_t value) const {
  // The default form makes what the stream did before visible to the whole system first.
  check_cuda(api_,
             api_.stream_write_value32(stream, address_ + offset(flag), static_cast<uint32_t>(value),
                                       kStreamWriteValueDefault),
             "cuStreamWriteValue32");
}

void IpcFlags::raise(const Flag& flag, int64_t value) const noexcept {
  const std::atomic_ref word(*reinterpret_cast<uint32_t*>(memory_->of(0) + offset(flag)));
  const auto target = static_cast<uint32_t>(value);
  if (static_cast<int32_t>(word.load(std::memory_order_relaxed) - target) < 0)
    word.store(target, std::memory_order_release);
}

void IpcFlags::release(int64_t steps, int64_t chunks) const noexcept {
  for (int owner = 0; owner < place_.size; ++owner) {
    raise({.owner = owner, .kind = Flag::kPosted}, steps);
    raise({.owner = owner, .kind = Flag::kDone}, steps);
    for (int peer = 0; peer < place_.size; ++peer) {
      raise({.owner = owner, .kind = Flag::kSent, .peer = peer}, chunks);
      raise({.owner = owner, .kind = Flag::kTaken, .peer = peer}, chunks);
    }
  }
}

}  // namespace trireme::comm
