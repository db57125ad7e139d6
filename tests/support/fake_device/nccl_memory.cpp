#include "tests/support/fake_device/nccl_memory.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/fake_device/memory.h"
#include "tests/support/fake_device/order.h"

namespace trireme::testing {

using namespace comm;  // the types of NVIDIA's libraries

namespace {

struct Registration {
  ncclComm* comm;
  FakeBytes memory;
};

struct NcclMemory {
  std::mutex mutex;
  std::map<void*, std::unique_ptr<Registration>> registrations;  // by handle
  std::map<void*, size_t> allocations;
  FakeNcclMemory counts;
  size_t limit = SIZE_MAX;
};
NcclMemory nccl_memory;

}  // namespace

ncclResult_t nccl_mem_alloc(void** data, size_t size) {
  const std::lock_guard lock(nccl_memory.mutex);
  if (size > nccl_memory.limit) return ncclUnhandledCudaError;
  *data = fake_allocator().raw_allocate(size);
  nccl_memory.allocations[*data] = size;
  return ncclSuccess;
}

ncclResult_t nccl_mem_free(void* data) {
  {
    const std::lock_guard lock(nccl_memory.mutex);
    const FakeBytes freed{data, nccl_memory.allocations.at(data)};
    nccl_memory.allocations.erase(data);
    Order& order = Order::get();
    const std::lock_guard order_lock(order.mutex);
    order.take_from_device(freed, "ncclMemFree");
    for (const auto& [handle, registration] : nccl_memory.registrations)
      if (overlap(freed, registration->memory)) order.races.push_back("ncclMemFree of memory that is registered");
  }
  fake_allocator().raw_deallocate(data);
  return ncclSuccess;
}

ncclResult_t nccl_comm_register(ncclComm* comm, void* data, size_t size, void** handle) {
  auto registration = std::make_unique<Registration>(Registration{comm, {data, size}});
  *handle = registration.get();
  const std::lock_guard lock(nccl_memory.mutex);
  nccl_memory.registrations[*handle] = std::move(registration);
  ++nccl_memory.counts.all_registrations;
  return ncclSuccess;
}

int64_t nccl_place_of(const ncclComm* comm, const FakeBytes& memory) {
  const std::lock_guard lock(nccl_memory.mutex);
  const auto* begin = static_cast<const std::byte*>(memory.data);
  for (const auto& [handle, registration] : nccl_memory.registrations) {
    const auto* first = static_cast<const std::byte*>(registration->memory.data);
    if (registration->comm == comm && begin >= first && begin + memory.bytes <= first + registration->memory.bytes)
      return begin - first;
  }
  return -1;
}

void nccl_count(bool is_registered) {
  const std::lock_guard lock(nccl_memory.mutex);
  ++(is_registered ? nccl_memory.counts.moved_in_place : nccl_memory.counts.copied);
}

void nccl_check_unused(const ncclComm* comm) {
  const std::lock_guard lock(nccl_memory.mutex);
  Order& order = Order::get();
  const std::lock_guard order_lock(order.mutex);
  for (const auto& [handle, registration] : nccl_memory.registrations)
    if (registration->comm == comm) order.take_from_device(registration->memory, "ncclCommDestroy", "nccl");
}

void nccl_forget(const ncclComm* comm) {
  const std::lock_guard lock(nccl_memory.mutex);
  std::erase_if(nccl_memory.registrations, [&](const auto& item) { return item.second->comm == comm; });
}

FakeNcclMemory fake_nccl_memory() {
  const std::lock_guard lock(nccl_memory.mutex);
  FakeNcclMemory counts = nccl_memory.counts;
  for (const auto& [handle, registration] : nccl_memory.registrations)
    counts.registered_bytes += static_cast<int64_t>(registration->memory.bytes);
  counts.registrations = static_cast<int64_t>(nccl_memory.registrations.size());
  return counts;
}

void limit_fake_nccl_memory(size_t bytes) {
  const std::lock_guard lock(nccl_memory.mutex);
  nccl_memory.limit = bytes;
}

}  // namespace trireme::testing
