#include "comm/backends/cuda_ipc/cuda_api.h"

#include <dlfcn.h>
#include <unistd.h>

#include <random>

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

template <class Function>
void fill_from_driver(void* driver, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(driver, name));
  if (function == nullptr)
    throw ConfigError(str("the NVIDIA driver has no ", name,
                          ", so that ranks cannot share GPU memory; install a driver "
                          "of CUDA 12 or later (525 or later)"));
}

CudaApi load_driver() {
  void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr)
    throw ConfigError(
        str("no NVIDIA driver can be loaded (", ::dlerror(), "); take the device \"cpu\", or install it"));
  CudaApi api{};
  fill_from_driver(driver, "cuGetErrorString", api.get_error_string);
  fill_from_driver(driver, "cuDeviceGet", api.device_get);
  fill_from_driver(driver, "cuDevicePrimaryCtxRetain", api.device_primary_ctx_retain);
  fill_from_driver(driver, "cuCtxSetCurrent", api.ctx_set_current);
  fill_from_driver(driver, "cuMemAlloc_v2", api.mem_alloc);
  fill_from_driver(driver, "cuMemFree_v2", api.mem_free);
  fill_from_driver(driver, "cuIpcGetMemHandle", api.ipc_get_mem_handle);
  fill_from_driver(driver, "cuIpcOpenMemHandle_v2", api.ipc_open_mem_handle);
  fill_from_driver(driver, "cuIpcCloseMemHandle", api.ipc_close_mem_handle);
  fill_from_driver(driver, "cuMemHostRegister_v2", api.mem_host_register);
  fill_from_driver(driver, "cuMemHostUnregister", api.mem_host_unregister);
  fill_from_driver(driver, "cuMemHostGetDevicePointer_v2", api.mem_host_get_device_pointer);
  fill_from_driver(driver, "cuMemcpyDtoDAsync_v2", api.memcpy_dtod_async);
  fill_from_driver(driver, "cuStreamWaitValue32_v2", api.stream_wait_value32);
  fill_from_driver(driver, "cuStreamWriteValue32_v2", api.stream_write_value32);
  // Processes of two containers that share a host's memory may have one number, so a random one stands beside it.
  static const auto drawn = static_cast<int64_t>(std::random_device{}());
  api.process_id = [] { return (drawn << 31) ^ static_cast<int64_t>(::getpid()); };
  return api;
}

}  // namespace

const CudaApi& load_cuda_driver() {
  static const CudaApi api = load_driver();
  return api;
}

void check_cuda(const CudaApi& api, CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  (void)api.get_error_string(result, &text);
  throw CommError(ErrorCode::kPeerLost,
                  str(what, " failed; the NVIDIA driver says: ", text != nullptr ? text : "nothing", " (error ",
                      static_cast<int>(result), ")"));
}

}  // namespace trireme::comm
