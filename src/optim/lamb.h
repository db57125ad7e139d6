// LAMB's update in two passes: between them the norms of whole parameters are summed over the ranks that hold their
// parts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "trireme/optim/options.h"

namespace trireme {

/// The squared norms of one parameter, or of a part of it.
struct LambNorms {
  double weights = 0;  ///< sum of squares
  double update = 0;   ///< sum of squares
};

/// Moves the moments as Adam's and returns the sums of squares of the weights and of u = m̂ / (√v̂ + eps) + decay ·
/// weights.
///
/// Shapes    all [n] fp32; `first` and `second` are the moments.
/// Cost      one pass: reads 16, writes 8 bytes per element; the sums are fp64.
LambNorms lamb_moments(const at::Tensor& weights, const at::Tensor& gradients, const at::Tensor& first,
                       const at::Tensor& second, const OptimizerOptions& options, double gradient_factor, int64_t step);

/// ‖weights‖ / ‖u‖ within [min_coeff, max_coeff]; 1 where one of them is zero.
double lamb_trust(const LambNorms& norms, const OptimizerOptions& options);

/// weights ← weights - lr · trust · u, with u computed anew from the moments: nothing is kept between the passes.
///
/// Source    You et al. 2020, arXiv:1904.00962, algorithm 2. Test: update_test.cpp.
void lamb_apply(const at::Tensor& weights, const at::Tensor& first, const at::Tensor& second,
                const OptimizerOptions& options, double trust, int64_t step);

}  // namespace trireme
