// Sums in the deterministic order: rank after rank, rounded to the accumulation dtype after each.
#pragma once

#include <ATen/core/Tensor.h>

namespace trireme {

/// shard = ((shard + rank 0's) + rank 1's) + …, or without the first addend where `replaces`.
/// Shapes    received [ranks * n], rank r's part at r * n; shard [n].
void fold_in_order(const at::Tensor& shard, const at::Tensor& received, bool replaces);

}  // namespace trireme
