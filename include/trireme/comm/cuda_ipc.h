// Ranks of one host that share a GPU, or have GPUs with peer access to each other: what is on the GPUs goes through
// memory that all of them map.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>

#include "trireme/comm/group.h"

namespace trireme {

/// Options of make_cuda_ipc_group().
struct CudaIpcOptions {
  /// Each rank has two slots of this size on its GPU, through which collectives go piece by piece. At least 4096 bytes
  /// for each rank of the group.
  int64_t slot_bytes = 4 << 20;
  /// Each rank also has two slots of this size for messages to each other rank. At least 4096.
  int64_t message_bytes = 256 << 10;
};

/// Tensors on `device` go through memory of the GPUs, on a stream of the group; tensors on the host by `host`, as
/// before. Collective over `host`, whose ranks share memory. Sums have the bits of every backend on the host.
///
/// Ordering  a call on the device starts after what the calling thread has enqueued on its current stream and does not
///           block; Pending::wait() lets the then current stream go on behind it and does not block either. After
///           wait() the tensors may be freed in the order of that stream. Of messages, wait() may block until they are
///           enqueued.
/// Cost      2 slot_bytes + 2 host->size() message_bytes of memory on each rank's GPU.
/// Throws    ConfigError: ranks that share no memory, GPUs without peer access, streams that cannot wait for memory;
///           no driver, or one older than CUDA 12.
std::unique_ptr<Group> make_cuda_ipc_group(std::unique_ptr<Group> host, c10::Device device,
                                           const CudaIpcOptions& options = {});

}  // namespace trireme
