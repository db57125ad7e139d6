#include "trireme/comm/world.h"

#include "comm/launch_variables.h"
#include "comm/rendezvous.h"

namespace trireme {

World init(const InitOptions& options) {
  const comm::Environment environment = comm::process_environment();
  const auto timeout = comm::read_timeout(environment, options.timeout);
  const comm::LaunchVariables launch = comm::read_launch_variables(environment);
  World world{.rank = launch.rank,
              .size = launch.size,
              .local_rank = launch.local_rank,
              .local_size = launch.local_size,
              .group = nullptr};
  world.group = comm::meet(launch, timeout);
  return world;
}

}  // namespace trireme
