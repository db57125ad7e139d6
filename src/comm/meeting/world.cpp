#include "trireme/comm/world.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/meeting/launch_variables.h"
#include "comm/meeting/rendezvous.h"
#include "trireme/base/error.h"

namespace trireme {

World init(const InitOptions& options) {
  const comm::Environment environment = comm::process_environment();
  const comm::WaitLimits limits = comm::read_limits(environment, options.timeout);
  const comm::LaunchVariables launch = comm::read_launch_variables(environment);
  World world{.rank = launch.rank,
              .size = launch.size,
              .local_rank = launch.local_rank,
              .local_size = launch.local_size,
              .group = nullptr};
  world.group = comm::meet(launch, limits);
  return world;
}

AwaitedRanks await_ranks(const AwaitOptions& options) {
  const comm::Environment environment = [&options, of_process = comm::process_environment()](const std::string& name) {
    const auto own = options.variables.find(name);
    return own == options.variables.end() ? of_process(name) : std::optional(own->second);
  };
  const comm::WaitLimits limits = comm::read_limits(environment, options.timeout);
  return comm::await(comm::read_launch_variables(environment), limits);
}

World join(const c10::intrusive_ptr<c10d::Store>& store, const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
           const JoinOptions& options) {
  const comm::Environment environment = comm::process_environment();
  JoinOptions read = options;
  read.transport = comm::read_transport(environment, options.transport);
  if (read.rank < 0 || read.rank >= read.size)
    throw ConfigError(str("join: expected a rank in [0, ", read.size, "), got ", read.rank));
  if (!store) throw ConfigError("join: expected the store where the ranks meet, got none");
  if (process_group && (process_group->getRank() != read.rank || process_group->getSize() != read.size))
    throw ConfigError(str("join: rank ", read.rank, " of ", read.size,
                          " was given a process group in which it is rank ", process_group->getRank(), " of ",
                          process_group->getSize()));
  return comm::meet_in(store, process_group, read, comm::read_limits(environment, options.timeout),
                       comm::read_token(environment));
}

}  // namespace trireme
