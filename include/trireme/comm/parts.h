// A whole tensor and the parts that the ranks of a group have of it: cut, and joined again.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "trireme/base/tensor_part.h"
#include "trireme/comm/group.h"

namespace trireme {

/// The elements of `whole` that are in `part`, contiguous; perhaps `whole` itself.
///
/// Requires  `whole` has the shape `part.shape`, and `part` some elements.
at::Tensor cut_part(const at::Tensor& whole, const TensorPart& part);

/// Gathers the whole tensor, bit for bit; each rank of `group` gives `own`, the part `parts[rank]`. Elements that
/// several ranks have are taken from the first. Perhaps `own` itself, where all ranks have all of it. Collective.
///
/// Requires  `parts` are cut along one dim, and together the tensor; `own` is contiguous.
/// Cost      memory for the whole tensor and for the largest part, on every rank.
at::Tensor join_parts(Group& group, const std::vector<TensorPart>& parts, const at::Tensor& own);

}  // namespace trireme
