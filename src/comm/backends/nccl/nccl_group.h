// The group of include/trireme/comm/nccl.h over a table of functions that need not be NCCL's own.
#pragma once

#include "comm/backends/nccl/nccl_api.h"
#include "trireme/comm/nccl.h"

namespace trireme::comm {

/// `api` outlives the group.
std::unique_ptr<Group> make_nccl_group(const NcclApi& api, std::unique_ptr<Group> host, c10::Device device,
                                       const NcclGroupOptions& options = {});

}  // namespace trireme::comm
