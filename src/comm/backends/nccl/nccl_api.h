// The functions of NCCL that are used, as a table: nothing links NCCL, and a machine without it runs everything else.
#pragma once

#if __has_include(<nccl.h>) && __has_include(<cuda_runtime_api.h>)
#define TRIREME_HAS_NCCL 1
#include <nccl.h>

namespace trireme::comm {

struct NcclApi {
  decltype(&::ncclGetVersion) get_version;
  decltype(&::ncclGetUniqueId) get_unique_id;
  decltype(&::ncclGetErrorString) get_error_string;
  decltype(&::ncclGetLastError) get_last_error;
  decltype(&::ncclCommInitRankConfig) comm_init_rank_config;
  decltype(&::ncclCommGetAsyncError) comm_get_async_error;
  decltype(&::ncclCommFinalize) comm_finalize;
  decltype(&::ncclCommDestroy) comm_destroy;
  decltype(&::ncclCommAbort) comm_abort;
  decltype(&::ncclAllReduce) all_reduce;
  decltype(&::ncclReduceScatter) reduce_scatter;
  decltype(&::ncclAllGather) all_gather;
  decltype(&::ncclBroadcast) broadcast;
  decltype(&::ncclReduce) reduce;
  decltype(&::ncclSend) send;
  decltype(&::ncclRecv) recv;
  decltype(&::ncclGroupStart) group_start;
  decltype(&::ncclGroupEnd) group_end;
  // All three, or none: since 2.19.
  decltype(&::ncclMemAlloc) mem_alloc;
  decltype(&::ncclMemFree) mem_free;
  decltype(&::ncclCommRegister) comm_register;
};

/// From the libnccl.so.2 that libtorch has loaded, or else from one that the loader or libtorch's package has. Loaded
/// once, for the life of the process.
/// Throws    ConfigError: none is there, a function is missing, or it is too old.
const NcclApi& load_nccl();

}  // namespace trireme::comm
#endif
