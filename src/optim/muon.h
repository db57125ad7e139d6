// Muon's arithmetic: a momentum whose matrix is made nearly orthogonal before it is subtracted.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "trireme/optim/options.h"
#include "trireme/pager/layout/shard_mesh.h"

namespace trireme {

/// momentum ← β momentum + (1 - β) g, with g = gradient_factor · gradients; returns (1 - β) g + β momentum (Nesterov).
///
/// Shapes    [n] fp32; gradients of any floating dtype.
at::Tensor muon_direction(const at::Tensor& momentum, const at::Tensor& gradients, double beta, double gradient_factor);

/// `steps` Newton-Schulz iterations X ← aX + (bXXᵀ + c(XXᵀ)²)X from `matrix` / ‖matrix‖, in fp32. The singular values
/// of the result lie around 1; five steps suffice.
///
/// Cost      steps · 2s²(2l + s) multiply-adds for a matrix of sides s ≤ l.
/// Source    Jordan et al. 2024, kellerjordan.github.io/posts/muon. Test: muon_test.cpp.
at::Tensor orthogonalise(const at::Tensor& matrix, int64_t steps);

/// weights ← weights (1 - lr · decay) - lr √max(1, rows / columns) · update. [n] fp32, a part of a matrix.
void muon_apply(const at::Tensor& weights, const at::Tensor& update, const OptimizerOptions& options,
                const std::vector<int64_t>& shape);

/// A matrix in the flat buffer of its unit.
struct PlacedMatrix {
  int64_t begin = 0;
  std::vector<int64_t> shape;  ///< two sides
  int64_t steps = 5;
};

/// Orthogonalises the matrices of a unit, each on one rank, whatever part of them this rank holds. Collective, with at
/// least one matrix; the same bits at any number of ranks.
///
/// Shapes    part: this rank's piece of a shard of `unit`, or all of the unit -> the same part of the results.
/// Cost      two fp32 buffers of the unit; of a shard an all-gather and a reduce-scatter, otherwise an all-reduce.
at::Tensor orthogonalise_parts(const at::Tensor& part, const std::vector<PlacedMatrix>& matrices,
                               const UnitLayout& unit, const ShardMesh& mesh);

/// Which rank orthogonalises which of the matrices: the dearest first, each to the rank with the least work so far.
/// The same on every rank.
std::vector<int> share_matrices(const std::vector<PlacedMatrix>& matrices, int ranks);

}  // namespace trireme
