// Signals as ranks answer them together: one rank may get a signal a step earlier than another, or alone.
#pragma once

#include "trireme/base/stop_signals.h"
#include "trireme/comm/group.h"

namespace trireme {

/// Whether any rank of `group` was asked to end (SIGINT, SIGTERM, SIGHUP); the same on all of them, so that a loop
/// `while (!trireme::stop_requested(*world.group))` ends at one step. Catches signals as stop_requested() of one
/// process. Collective.
///
/// Cost      one all-reduce of 4 bytes between the hosts.
bool stop_requested(Group& group);

/// Whether any rank of `group` was asked to save (SIGUSR1) since the last call; else as stop_requested().
bool take_save_request(Group& group);

}  // namespace trireme
