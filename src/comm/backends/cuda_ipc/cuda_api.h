// The functions of the CUDA driver that are used, as a table: nothing links the driver, which only machines with a GPU
// have.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/backends/cuda_ipc/cuda_abi.h"

namespace trireme::comm {

struct CudaApi {
  CUresult (*get_error_string)(CUresult error, const char** text);
  CUresult (*device_get)(CUdevice* device, int number);
  CUresult (*device_primary_ctx_retain)(CUcontext* context, CUdevice device);
  CUresult (*ctx_set_current)(CUcontext context);
  CUresult (*mem_alloc)(CUdeviceptr* data, size_t bytes);
  CUresult (*mem_free)(CUdeviceptr data);
  CUresult (*ipc_get_mem_handle)(CUipcMemHandle* handle, CUdeviceptr data);
  CUresult (*ipc_open_mem_handle)(CUdeviceptr* data, CUipcMemHandle handle, unsigned flags);
  CUresult (*ipc_close_mem_handle)(CUdeviceptr data);
  CUresult (*mem_host_register)(void* data, size_t bytes, unsigned flags);
  CUresult (*mem_host_unregister)(void* data);
  CUresult (*mem_host_get_device_pointer)(CUdeviceptr* device, void* host, unsigned flags);
  CUresult (*memcpy_dtod_async)(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
  CUresult (*stream_wait_value32)(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags);
  CUresult (*stream_write_value32)(CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags);
  /// The process of the driver's client: memory of one process is opened by others only.
  int64_t (*process_id)();
};

/// From libcuda.so.1. Loaded once, for the life of the process.
/// Throws    ConfigError: there is no driver, or it is too old.
const CudaApi& load_cuda_driver();

/// Throws CommError with what the driver says, unless `result` is success.
void check_cuda(const CudaApi& api, CUresult result, const char* what);

}  // namespace trireme::comm
