// The group of include/trireme/comm/cuda_ipc.h over a table of functions that need not be the driver's own.
#pragma once

#include "comm/backends/cuda_ipc/cuda_api.h"
#include "trireme/comm/cuda_ipc.h"

namespace trireme::comm {

/// `api` outlives the process's last group.
std::unique_ptr<Group> make_cuda_ipc_group(const CudaApi& api, std::unique_ptr<Group> host, c10::Device device,
                                           const CudaIpcOptions& options = {});

}  // namespace trireme::comm
