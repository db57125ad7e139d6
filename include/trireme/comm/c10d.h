// A group over a process group of torch.distributed: for ranks that share no memory, such as several hosts.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

#include "trireme/comm/group.h"

namespace c10d {
class ProcessGroup;
}

namespace trireme {

/// Options of make_c10d_group().
struct C10dGroupOptions {
  std::string name = "world";
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  /// So long a wait is silent about the peer that it waits for.
  std::chrono::milliseconds warn_after = std::chrono::minutes(1);
};

/// Collective over `process_group`, as are the calls of the group: all its ranks make one, in the same order.
/// Everything is sent by send() and recv() of its backend for host tensors (Gloo, MPI), under tags from 16384 to 32767;
/// the program may still use the process group with other tags. The receiving rank folds sums in rank order: the same
/// bits as in every backend but nccl.
///
/// Cost      the cost lines of docs/comm.md, and a description of 512 bytes: to every peer per collective, to the
///           receiver per message.
/// Throws    ConfigError (kUnsupported): no backend for tensors on the host, as with NCCL alone.
std::unique_ptr<Group> make_c10d_group(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
                                       const C10dGroupOptions& options = {});

}  // namespace trireme
