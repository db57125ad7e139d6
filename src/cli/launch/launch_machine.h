// The facts of this machine that a launch needs.
#pragma once

#include <string>

#include "cli/launch/launch_plan.h"

namespace trireme::cli {

/// Host name, the cores that this process may use, a port on 127.0.0.1 that was free a moment ago, and a secret for the
/// ranks.
///
/// Throws    IoError: no port is free.
LaunchMachine this_machine();

/// The cores that this process may use.
int usable_cores();

/// The Python under which scripts are run: that of TRIREME_PYTHON, else the one that the package is built for.
std::string python_of_scripts();

/// Throws    ConfigError: somebody listens on `port` already.
void check_port_is_free(int port);

/// Throws    ConfigError: the request's program is a Python script, by its name, and no such file is there. Python
///           would say so on every rank.
void check_script(const LaunchRequest& request);

}  // namespace trireme::cli
