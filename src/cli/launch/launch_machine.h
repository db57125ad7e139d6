// The facts of this machine that a launch needs.
#pragma once

#include "cli/launch/launch_plan.h"

namespace trireme::cli {

/// Host name, the cores that this process may use, and a port on 127.0.0.1 that was free a moment ago.
///
/// Throws    IoError: no port is free.
LaunchMachine this_machine();

/// Throws    ConfigError: somebody listens on `port` already.
void check_port_is_free(int port);

}  // namespace trireme::cli
