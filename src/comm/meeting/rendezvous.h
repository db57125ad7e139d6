// How the processes of a job find each other: one exchange of small records through a c10d store, then shared memory
// only, or a process group.
#pragma once

#include <memory>
#include <string>

#include "comm/meeting/launch_variables.h"
#include "trireme/comm/group.h"
#include "trireme/comm/world.h"

namespace trireme::comm {

/// Joins the ranks of one host into the group "world".
///
/// Throws    ConfigError (kUnsupported): ranks on several hosts, named. CommError: a rank that did not come, named.
///           IoError: shared memory that cannot be made or opened, an address that cannot be used.
std::unique_ptr<Group> meet(const LaunchVariables& launch, const WaitLimits& limits);

/// Where the ranks of `launch` have all come.
///
/// Throws    CommError: a rank that did not come, named. IoError: an address that cannot be used.
AwaitedRanks await(const LaunchVariables& launch, const WaitLimits& limits);

/// join() with options that have been checked; `limits` and `token` of the environment.
World meet_in(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
              const JoinOptions& options, const WaitLimits& limits, const std::string& token);

}  // namespace trireme::comm
