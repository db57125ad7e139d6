#include "optim/muon.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace trireme {

at::Tensor muon_direction(const at::Tensor& momentum, const at::Tensor& gradients, double beta,
                          double gradient_factor) {
  at::Tensor direction = gradients.to(at::kFloat) * gradient_factor;
  momentum.lerp_(direction, 1 - beta);
  return direction.lerp_(momentum, beta);
}

at::Tensor orthogonalise(const at::Tensor& matrix, int64_t steps) {
  // Jordan's coefficients: the steepest slope at zero whose iterates stay near 1.
  constexpr double kLinear = 3.4445, kCubic = -4.7750, kQuintic = 2.0315;
  const bool is_tall = matrix.size(0) > matrix.size(1);  // the products of the shorter side are cheaper
  at::Tensor x = is_tall ? matrix.t() : matrix;
  x = x / (x.norm() + 1e-7);
  for (int64_t step = 0; step < steps; ++step) {
    const at::Tensor gram = at::mm(x, x.t());
    const at::Tensor polynomial = gram * kCubic + at::mm(gram, gram) * kQuintic;
    x = x * kLinear + at::mm(polynomial, x);
  }
  return is_tall ? x.t() : x;
}

void muon_apply(const at::Tensor& weights, const at::Tensor& update, const OptimizerOptions& options,
                const std::vector<int64_t>& shape) {
  const double scale = std::sqrt(std::max(1.0, static_cast<double>(shape[0]) / static_cast<double>(shape[1])));
  weights.mul_(1 - options.lr * options.weight_decay).sub_(update, options.lr * scale);
}

at::Tensor orthogonalise_parts(const at::Tensor& part, const std::vector<PlacedMatrix>& matrices,
                               const UnitLayout& unit, const ShardMesh& mesh) {
  Group& group = mesh.shards;
  const int64_t unit_numel = unit.numel();
  const bool is_shard = part.numel() != unit_numel;
  const bool is_piece = is_shard && unit.pieces > 1;
  at::Tensor whole = part;
  if (is_piece) {
    whole = at::empty({unit.shard_numel}, part.options());
    mesh.replicas->all_gather(whole, part).wait();
  }
  if (is_shard) {
    const at::Tensor shard = std::exchange(whole, at::empty({unit_numel}, part.options()));
    group.all_gather(whole, shard).wait();
  }
  const std::vector<int> owners = share_matrices(matrices, group.size());
  at::Tensor result = at::zeros({unit_numel}, part.options());
  for (size_t i = 0; i < matrices.size(); ++i) {
    if (owners[i] != group.rank()) continue;
    const auto& [begin, shape, steps] = matrices[i];
    const int64_t numel = shape[0] * shape[1];
    result.narrow(0, begin, numel).view(shape).copy_(orthogonalise(whole.narrow(0, begin, numel).view(shape), steps));
  }
  // Only the owner's addend is not zero, so the sums are exact.
  if (is_shard) {
    at::Tensor own = at::empty({unit.shard_numel}, part.options());
    group.reduce_scatter(own, result).wait();
    return is_piece ? own.narrow(0, unit.piece_numel() * mesh.replica(), unit.piece_numel()) : own;
  }
  if (group.size() > 1) group.all_reduce(result).wait();
  return result;
}

std::vector<int> share_matrices(const std::vector<PlacedMatrix>& matrices, int ranks) {
  const auto cost = [&](size_t i) {
    const std::vector<int64_t>& shape = matrices[i].shape;
    const auto small = static_cast<double>(std::min(shape[0], shape[1]));
    const auto large = static_cast<double>(std::max(shape[0], shape[1]));
    return small * small * (2 * large + small);
  };
  std::vector<size_t> order(matrices.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return cost(a) > cost(b); });
  std::vector<double> work(ranks, 0.0);
  std::vector<int> owners(matrices.size(), 0);
  for (const size_t i : order) {
    const auto least = std::min_element(work.begin(), work.end());
    *least += cost(i);
    owners[i] = static_cast<int>(least - work.begin());
  }
  return owners;
}

}  // namespace trireme
