// The slices of a StateTree, checked and without their data, as the ranks tell them to each other.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/state_tree.h"
#include "trireme/checkpoint/reshard.h"

namespace trireme {

/// Throws    CheckpointError naming the tensor: no data, data elsewhere than on the host, not contiguous; a part that
///           does not fit its shape; values that are not JSON.
std::vector<SliceSpec> slices_of(const StateTree& state);

std::string dump_slices(const std::vector<SliceSpec>& slices);
std::vector<SliceSpec> parse_slices(std::string_view text);

}  // namespace trireme
