// Writes of a program into parameters must have the same values on every rank, since each keeps its own part of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

/// A hash of the bytes of `flat`, contiguous; never 0. The same for the same bytes on one kind of device, for which it
/// waits.
int64_t digest_of(const at::Tensor& flat);

/// Compares what ranks have written: a digest of each of some values, 0 where there is none. Returns whether there is
/// any. Collective.
///
/// Cost      one all-reduce of 16 bytes between the hosts.
/// Throws    StateError, on every rank: some rank has another digest; says by `name_of` of which value.
bool require_same(Group& group, const std::vector<int64_t>& digests, const std::function<std::string(size_t)>& name_of);

}  // namespace trireme
