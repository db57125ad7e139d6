// A process group of c10d among threads, with Gloo's manners: what a Python program would hand over, without a network.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace trireme {

/// How a backend answers besides moving bytes. In both, a transfer is complete when both sides have come, lengths that
/// differ are an error on both, and what nobody holds any more is withdrawn.
enum class BackendManners {
  kGloo,  ///< a transfer is seen to be complete only by waiting for it
  kMpi,   ///< wait() knows no timeout
};

struct ThreadProcessGroups {
  /// One for each rank.
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
  /// Cuts all connections of `rank`, as the end of its process does.
  std::function<void(int rank)> lose;
};

ThreadProcessGroups make_process_groups(int size, BackendManners manners = BackendManners::kGloo);

/// A process group that moves nothing but tensors on GPUs.
c10::intrusive_ptr<c10d::ProcessGroup> make_gpu_process_group();

}  // namespace trireme
