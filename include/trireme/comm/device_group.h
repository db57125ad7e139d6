// The group for tensors on devices, over NCCL or CUDA IPC. It is made from the host's group, in which the ranks have
// found each other.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "trireme/comm/group.h"

namespace trireme {

/// `group` where it serves `device` or has one rank; else a group over its ranks that does, which `made` owns: over
/// NCCL where every rank has a GPU of its own, over CUDA IPC where ranks share one. Collective unless `group` is
/// returned; `group` outlives it.
///
/// Throws    as make_nccl_group() and make_cuda_ipc_group(); ConfigError (kUnsupported): devices that are no GPUs.
Group& group_for(Group& group, c10::Device device, std::unique_ptr<Group>& made);

}  // namespace trireme
