// The CUDA driver for the fake device: memory, its export to other ranks, and streams that wait for flags.
#pragma once

#include <memory>

#include "comm/backends/cuda_ipc/ipc_group.h"
#include "tests/support/fake_device/fake_device.h"
#include "trireme/comm/group.h"

namespace trireme::testing {

/// A group over `device`, a fake one, whose calls go through the cuda_ipc backend and a fake driver. Collective over
/// `host`: it is made over a group split from it, so that `host` may be the harness's. Ranks may share a device.
///
/// The fake runs operators when they are enqueued, so that, unlike with a GPU, a call blocks in the host until its
/// peers have made theirs.
std::unique_ptr<Group> make_fake_cuda_ipc_group(Group& host, c10::Device device, const CudaIpcOptions& options = {});

/// The calls that the fake driver refuses from now on, until it is told kNothing.
enum class FakeCudaFault { kNothing, kNoMemory, kNoPeerAccess, kNoStreamMemoryOperations };
void set_fake_cuda_fault(FakeCudaFault fault);

/// Parts of memory that peers can open and that are not freed yet.
int fake_cuda_allocations();

}  // namespace trireme::testing
