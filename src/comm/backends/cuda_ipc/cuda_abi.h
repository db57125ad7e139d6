// The types and constants of the CUDA driver that Trireme passes to it, declared here: a build needs no header of
// CUDA's.
//
// The driver keeps its binary interface; a function that changed has a new name, such as cuMemAlloc_v2.
// tests/comm/nvidia_headers_test.cpp compares every declaration with the real cuda.h where one is installed.
// Source    CUDA 12 and 13, cuda.h.
#pragma once

#include <cstdint>

struct CUctx_st;
struct CUstream_st;

namespace trireme::comm {

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = ::CUctx_st*;
using CUstream = ::CUstream_st*;

enum CUresult : unsigned {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
  CUDA_ERROR_NOT_SUPPORTED = 801,
};

struct CUipcMemHandle {
  char reserved[64];
};

// CU_IPC_MEM_…, CU_MEMHOSTREGISTER_…, CU_STREAM_…: macros in cuda.h.
inline constexpr unsigned kIpcMemLazyEnablePeerAccess = 1;
inline constexpr unsigned kMemHostRegisterPortable = 1;
inline constexpr unsigned kMemHostRegisterDeviceMap = 2;
inline constexpr unsigned kStreamWaitValueGeq = 0;
inline constexpr unsigned kStreamWriteValueDefault = 0;

}  // namespace trireme::comm
