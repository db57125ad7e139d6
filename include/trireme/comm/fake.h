// A group that moves nothing: counts calls and bytes, for the planner and for tests of cost lines.
#pragma once

#include <memory>

#include "trireme/comm/group.h"

namespace trireme {

/// Rank `rank` of `size` that are not there, and share no memory. Every operation checks its arguments, counts and is
/// complete at once; outputs are left as they are.
std::unique_ptr<Group> make_fake_group(int rank, int size);

}  // namespace trireme
