// The functions of the CUDA driver that are used, as a table: nothing links the driver, which only machines with a GPU
// have.
#pragma once

#if __has_include(<cuda.h>)
#define TRIREME_HAS_CUDA 1
#include <cuda.h>

#include <cstdint>

namespace trireme::comm {

struct CudaApi {
  decltype(&::cuGetErrorString) get_error_string;
  decltype(&::cuDeviceGet) device_get;
  decltype(&::cuDevicePrimaryCtxRetain) device_primary_ctx_retain;
  decltype(&::cuCtxSetCurrent) ctx_set_current;
  decltype(&::cuMemAlloc) mem_alloc;
  decltype(&::cuMemFree) mem_free;
  decltype(&::cuIpcGetMemHandle) ipc_get_mem_handle;
  decltype(&::cuIpcOpenMemHandle) ipc_open_mem_handle;
  decltype(&::cuIpcCloseMemHandle) ipc_close_mem_handle;
  decltype(&::cuMemHostRegister) mem_host_register;
  decltype(&::cuMemHostUnregister) mem_host_unregister;
  decltype(&::cuMemHostGetDevicePointer) mem_host_get_device_pointer;
  decltype(&::cuMemcpyDtoDAsync) memcpy_dtod_async;
  decltype(&::cuStreamWaitValue32) stream_wait_value32;
  decltype(&::cuStreamWriteValue32) stream_write_value32;
  /// Of the driver's client: memory of one process is opened by others only.
  int64_t (*process_id)();
};

/// From libcuda.so.1. Loaded once, for the life of the process.
/// Throws    ConfigError: there is no driver, or it is too old.
const CudaApi& load_cuda_driver();

/// Throws CommError with what the driver says, unless `result` is success.
void check_cuda(const CudaApi& api, CUresult result, const char* what);

}  // namespace trireme::comm
#endif
