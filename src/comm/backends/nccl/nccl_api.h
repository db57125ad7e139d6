// The functions of NCCL that are used, as a table: nothing links NCCL, and a machine without it runs everything else.
#pragma once

#include "comm/backends/nccl/nccl_abi.h"

namespace trireme::comm {

struct NcclApi {
  ncclResult_t (*get_version)(int* version);
  ncclResult_t (*get_unique_id)(ncclUniqueId* id);
  const char* (*get_error_string)(ncclResult_t result);
  const char* (*get_last_error)(ncclComm_t comm);
  ncclResult_t (*comm_init_rank_config)(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config);
  ncclResult_t (*comm_get_async_error)(ncclComm_t comm, ncclResult_t* error);
  ncclResult_t (*comm_finalize)(ncclComm_t comm);
  ncclResult_t (*comm_destroy)(ncclComm_t comm);
  ncclResult_t (*comm_abort)(ncclComm_t comm);
  ncclResult_t (*all_reduce)(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                             ncclComm_t comm, cudaStream_t stream);
  ncclResult_t (*reduce_scatter)(const void* from, void* to, size_t count_of_shard, ncclDataType_t type, ncclRedOp_t op,
                                 ncclComm_t comm, cudaStream_t stream);
  ncclResult_t (*all_gather)(const void* from, void* to, size_t count_of_shard, ncclDataType_t type, ncclComm_t comm,
                             cudaStream_t stream);
  ncclResult_t (*broadcast)(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                            cudaStream_t stream);
  ncclResult_t (*reduce)(const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                         ncclComm_t comm, cudaStream_t stream);
  ncclResult_t (*send)(const void* from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                       cudaStream_t stream);
  ncclResult_t (*recv)(void* to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream);
  ncclResult_t (*group_start)();
  ncclResult_t (*group_end)();
  // All three, or none: since 2.19.
  ncclResult_t (*mem_alloc)(void** data, size_t bytes);
  ncclResult_t (*mem_free)(void* data);
  ncclResult_t (*comm_register)(const ncclComm_t comm, void* data, size_t bytes, void** handle);
};

/// From the libnccl.so.2 that libtorch has loaded, or else from one that the loader or libtorch's package has. Loaded
/// once, for the life of the process.
/// Throws    ConfigError: none is there, a function is missing, or it is too old.
const NcclApi& load_nccl();

}  // namespace trireme::comm
