// From the losses of tokens to that of a batch.
#pragma once

#include "trireme/recompute/tiled.h"

namespace trireme::detail {

/// Shapes    losses [N], target [N]. `options.reduction` as cross_entropy: a mean is weighted, and leaves ignored
///           targets out.
at::Tensor reduce_losses(const at::Tensor& losses, const at::Tensor& target, const TiledLossOptions& options);

}  // namespace trireme::detail
