// Writes of a program into parameters must have the same values on every rank, since each keeps its own part of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

/// A hash of the bytes of `flat`, which is contiguous; never 0. Equal bytes have equal hashes on one kind of device.
/// The host waits for the device.
int64_t digest_of(const at::Tensor& flat);

/// Compares the ranks' writes by a digest of each value; 0: not written. Returns whether any value was written.
/// Collective.
///
/// Cost      one all-reduce of 16 bytes between the hosts.
/// Throws    StateError, on every rank: ranks have different digests of a value, which `name_of` names.
bool require_same(Group& group, const std::vector<int64_t>& digests, const std::function<std::string(size_t)>& name_of);

}  // namespace trireme
