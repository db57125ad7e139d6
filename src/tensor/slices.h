// How one dim of a tensor is cut over the ranks of a tensor group, and what views make of it. Pure arithmetic.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "trireme/activations/placement.h"

namespace trireme::tensor {

/// The ranks' parts of [begin, end). Nothing: some rank has none of it.
std::optional<Ranges> within(const Ranges& ranges, int64_t begin, int64_t end);

/// `cut` of a tensor of the whole sizes `from` after a view of the whole sizes `to`. Nothing: the view cuts through
/// slices.
std::optional<Cut> cut_of_view(const std::vector<int64_t>& from, const Cut& cut, const std::vector<int64_t>& to);

/// `sizes` with the value of its -1, if there is one. Nothing: they are not sizes of `numel` elements.
std::optional<std::vector<int64_t>> resolved_sizes(std::vector<int64_t> sizes, int64_t numel);

}  // namespace trireme::tensor
