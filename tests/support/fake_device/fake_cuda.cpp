#include "tests/support/fake_device/fake_cuda.h"

#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <numeric>
#include <vector>

#include "tests/support/fake_device/order.h"

namespace trireme::testing {

using namespace comm;  // the types of NVIDIA's libraries

namespace {

std::atomic<FakeCudaFault> fault{FakeCudaFault::kNothing};
std::mutex cuda_mutex;
std::map<CUdeviceptr, int> allocations;  // with how many have it open; guarded by cuda_mutex
std::map<void*, size_t> registrations;   // of host memory; guarded by cuda_mutex
thread_local int current_context = 0;    // device + 1

/// Ranks are threads here, and processes there.
int64_t thread_number() {
  static std::atomic<int64_t> next{1};
  thread_local const int64_t number = next++;
  return number;
}

CUresult allocate(CUdeviceptr* data, size_t bytes) {
  if (fault == FakeCudaFault::kNoMemory) return CUDA_ERROR_OUT_OF_MEMORY;
  if (current_context == 0) return CUDA_ERROR_INVALID_CONTEXT;
  Order& order = Order::get();
  {
    const std::lock_guard lock(order.mutex);
    *data = reinterpret_cast<CUdeviceptr>(order.allocate(bytes, (current_context - 1) * kStreamsPerDevice));
  }
  const std::lock_guard lock(cuda_mutex);
  allocations[*data] = 0;
  return CUDA_SUCCESS;
}

CUresult release(CUdeviceptr data) {
  const std::lock_guard lock(cuda_mutex);
  const auto found = allocations.find(data);
  if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
  Order& order = Order::get();
  const std::lock_guard order_lock(order.mutex);
  if (found->second != 0) order.races.push_back("memory was freed while a peer had it open");
  allocations.erase(found);
  // The driver waits for the device first.
  auto& block = order.blocks.at(reinterpret_cast<const std::byte*>(data));
  block.accesses.clear();
  order.free(reinterpret_cast<void*>(data));
  return CUDA_SUCCESS;
}

CUresult export_memory(CUipcMemHandle* handle, CUdeviceptr data) {
  std::memcpy(handle, &data, sizeof data);
  return CUDA_SUCCESS;
}

CUresult open_memory(CUdeviceptr* data, CUipcMemHandle handle, unsigned) {
  if (fault == FakeCudaFault::kNoPeerAccess) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  std::memcpy(data, &handle, sizeof *data);
  const std::lock_guard lock(cuda_mutex);
  ++allocations.at(*data);
  return CUDA_SUCCESS;
}

CUresult close_memory(CUdeviceptr data) {
  const std::lock_guard lock(cuda_mutex);
  --allocations.at(data);
  return CUDA_SUCCESS;
}

CUresult register_host(void* data, size_t bytes, unsigned) {
  const std::lock_guard lock(cuda_mutex);
  return registrations.emplace(data, bytes).second ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

CUresult unregister_host(void* data) {
  const std::lock_guard lock(cuda_mutex);
  const auto found = registrations.find(data);
  if (found == registrations.end()) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
  fake_forget_flags(data, found->second);
  registrations.erase(found);
  return CUDA_SUCCESS;
}

CUresult copy(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  auto* const target = reinterpret_cast<void*>(to);
  const auto* const source = reinterpret_cast<const void*>(from);
  fake_launch("cuda copy", {fake_stream_of(stream), {{source, bytes}}, {{target, bytes}}},
              [&] { std::memcpy(target, source, bytes); });
  return CUDA_SUCCESS;
}

CUresult wait_value(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags) {
  if (fault == FakeCudaFault::kNoStreamMemoryOperations) return CUDA_ERROR_NOT_SUPPORTED;
  if (flags != kStreamWaitValueGeq) return CUDA_ERROR_INVALID_VALUE;
  fake_wait_for_flag(fake_stream_of(stream), reinterpret_cast<uint32_t*>(address), value);
  return CUDA_SUCCESS;
}

CUresult write_value(CUstream stream, CUdeviceptr address, uint32_t value, unsigned) {
  fake_write_flag(fake_stream_of(stream), reinterpret_cast<uint32_t*>(address), value);
  return CUDA_SUCCESS;
}

comm::CudaApi make_cuda_api() {
  comm::CudaApi api{};
  api.get_error_string = [](CUresult result, const char** text) {
    *text = result == CUDA_ERROR_OUT_OF_MEMORY             ? "out of memory"
            : result == CUDA_ERROR_PEER_ACCESS_UNSUPPORTED ? "peer access is not supported"
                                                           : "an error";
    return CUDA_SUCCESS;
  };
  api.device_get = [](CUdevice* device, int number) { return *device = number, CUDA_SUCCESS; };
  api.device_primary_ctx_retain = [](CUcontext* context, CUdevice device) {
    return *context = reinterpret_cast<CUcontext>(static_cast<intptr_t>(device + 1)), CUDA_SUCCESS;
  };
  api.ctx_set_current = [](CUcontext context) {
    return current_context = static_cast<int>(reinterpret_cast<intptr_t>(context)), CUDA_SUCCESS;
  };
  api.mem_alloc = allocate;
  api.mem_free = release;
  api.ipc_get_mem_handle = export_memory;
  api.ipc_open_mem_handle = open_memory;
  api.ipc_close_mem_handle = close_memory;
  api.mem_host_register = register_host;
  api.mem_host_unregister = unregister_host;
  api.mem_host_get_device_pointer = [](CUdeviceptr* device, void* host, unsigned) {
    return *device = reinterpret_cast<CUdeviceptr>(host), CUDA_SUCCESS;
  };
  api.memcpy_dtod_async = copy;
  api.stream_wait_value32 = wait_value;
  api.stream_write_value32 = write_value;
  api.process_id = thread_number;
  return api;
}

std::unique_ptr<Group> over_fake_driver(std::unique_ptr<Group> host, c10::Device device,
                                        const CudaIpcOptions& options) {
  static const comm::CudaApi api = make_cuda_api();
  return comm::make_cuda_ipc_group(api, std::move(host), device, options);
}

}  // namespace

void set_fake_cuda_fault(FakeCudaFault next) { fault = next; }

int fake_cuda_allocations() {
  const std::lock_guard lock(cuda_mutex);
  return static_cast<int>(allocations.size());
}

std::unique_ptr<Group> make_fake_cuda_ipc_group(Group& host, c10::Device device, const CudaIpcOptions& options) {
  return over_fake_driver(host.clone(host.name() + "." + device.str()), device, options);
}

}  // namespace trireme::testing
