// The fake NCCL's view of memory: what it has allocated, and what is registered with which communicator.
#pragma once

#include "comm/backends/nccl/nccl_api.h"
#include "tests/support/fake_device/fake_device.h"

namespace trireme::testing {

// NCCL's own functions.
comm::ncclResult_t nccl_mem_alloc(void** data, size_t size);
comm::ncclResult_t nccl_mem_free(void* data);
comm::ncclResult_t nccl_comm_register(comm::ncclComm* comm, void* data, size_t size, void** handle);

/// Where in what is registered with `comm` all of `memory` begins; -1: nowhere.
int64_t nccl_place_of(const comm::ncclComm* comm, const FakeBytes& memory);
/// A reduction or an all-gather of one rank, between memory that is registered or not.
void nccl_count(bool is_registered);
/// A race where a call of `comm` may still use what is registered with it.
void nccl_check_unused(const comm::ncclComm* comm);
/// `comm` is gone, and what was registered with it.
void nccl_forget(const comm::ncclComm* comm);

}  // namespace trireme::testing
