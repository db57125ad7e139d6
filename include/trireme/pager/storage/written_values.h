// Writes of a program into parameters must have the same values on every rank, since each keeps its own part of them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

/// Compares the ranks' writes by the digest_of() each value; 0: not written. Returns whether any value was written.
/// Collective.
///
/// Cost      as first_difference().
/// Throws    StateError, on every rank: ranks have different digests of a value, which `name_of` names.
bool require_same(Group& group, const std::vector<int64_t>& digests, const std::function<std::string(size_t)>& name_of);

}  // namespace trireme
