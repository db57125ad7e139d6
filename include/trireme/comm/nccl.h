// Ranks with a GPU each, on one host or several: what is on the GPUs goes by NCCL.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "trireme/comm/group.h"

namespace trireme {

/// Options of make_nccl_group().
struct NcclGroupOptions {
  /// How sums of fp32, bf16, fp16 and fp64 are made.
  enum class Sums {
    kFast,         ///< by NCCL, in its own order; 16-bit sums are rounded at each of its steps
    kInRankOrder,  ///< exchanged by NCCL and folded by the receiver: the bits of every other backend
  };
  Sums sums = Sums::kFast;
};

/// Tensors on `device`, a GPU that no other rank has, go by NCCL on a stream of the group; tensors on the host by
/// `host`, as before. Collective over `host`.
///
/// Ordering  a call on the device starts after what the calling thread has enqueued on its current stream and does not
///           block; Pending::wait() lets the then current stream go on behind it and does not block either. After
///           wait() the tensors may be freed in the order of that stream. Of messages, wait() blocks until both ends
///           are connected; the first call of each kind may block while NCCL connects.
/// Throws    ConfigError: no NCCL, or too old; two ranks on one GPU (make_cuda_ipc_group() serves them). CommError: a
///           rank did not come.
std::unique_ptr<Group> make_nccl_group(std::unique_ptr<Group> host, c10::Device device,
                                       const NcclGroupOptions& options = {});

}  // namespace trireme
