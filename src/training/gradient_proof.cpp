#include "training/gradient_proof.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sin.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

// Ranks that run the same kernels on the same numbers get the same bits. Where memory lies elsewhere a kernel may add
// in another order: far below this part of a gradient's norm, and of all gradients' norm where a gradient is 0 but for
// rounding. A missing sum is of the gradient's size.
constexpr double kOfOwnNorm = 1e-3, kOfAllNorms = 1e-6;

}  // namespace

GradientProof::GradientProof(Pager& pager, Group& shards, Group& tensor, const PartitionPlan& plan)
    : pager_(pager), shards_(shards), tensor_(tensor) {
  for (const ParameterSpec& spec : pager.parameters()) {
    const auto planned = std::find_if(plan.parameters.begin(), plan.parameters.end(),
                                      [&](const PartitionedParameter& one) { return one.name == spec.name; });
    parameters_.push_back(planned != plan.parameters.end() ? &*planned : nullptr);
  }
}

void GradientProof::show() {
  if (is_shown_) return;
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(parameters_.size());
  const at::Tensor own = at::zeros({count, 2}, at::kDouble);  // sum of squares, product
  for (const OwnedSlice& slice : pager_.owned()) {
    pager_.await_owned(slice.unit);
    for (const Portion& portion :
         portions_of(pager_.layout().units[slice.unit], slice.begin, slice.gradients.numel())) {
      const at::Tensor gradient = slice.gradients.narrow(0, portion.slice_begin, portion.numel).to(at::kDouble);
      const at::Tensor vector =
          at::arange(portion.parameter_begin, portion.parameter_begin + portion.numel, gradient.options())
              .mul_(0.7)
              .add_(portion.parameter)
              .sin_();
      own[portion.parameter][0] += gradient.square().sum().cpu();
      own[portion.parameter][1] += gradient.mul(vector).sum().cpu();
    }
  }
  shards_.all_reduce(own).wait();
  const at::Tensor all = at::empty({tensor_.size(), count, 2}, at::kDouble);
  tensor_.all_gather(all.flatten(), own.flatten()).wait();
  if (!all.isfinite().all().item<bool>()) return;  // a step that is skipped
  is_shown_ = true;
  const auto numbers = all.accessor<double, 3>();
  const double all_norm = std::sqrt(all.select(2, 0).sum(1).max().item<double>());
  for (int64_t i = 0; i < count; ++i) {
    if (parameters_[static_cast<size_t>(i)] == nullptr) continue;
    const std::vector<TensorPart>& parts = parameters_[static_cast<size_t>(i)]->parts;
    for (int rank = 1; rank < tensor_.size(); ++rank) {
      const auto first = std::find(parts.begin(), parts.end(), parts[static_cast<size_t>(rank)]) - parts.begin();
      if (first == rank) continue;
      const double norm = std::sqrt(std::max(numbers[first][i][0], numbers[rank][i][0]));
      const double other = std::sqrt(std::min(numbers[first][i][0], numbers[rank][i][0]));
      const double difference = std::max(norm - other, std::abs(numbers[first][i][1] - numbers[rank][i][1]));
      if (difference <= kOfOwnNorm * norm + kOfAllNorms * all_norm) continue;
      throw StateError(
          str("step: ranks ", first, " and ", rank, " of group '", tensor_.name(),
              "', on the axis \"tensor\", have the "
              "same elements of \"",
              parameters_[static_cast<size_t>(i)]->name, "\" and other gradients of them, of norms ",
              std::sqrt(numbers[first][i][0]), " and ", std::sqrt(numbers[rank][i][0]),
              "; they get the same batches and random numbers, and what uses it on slices runs by libtorch's operators "
              "inside of this engine's forward. No weight has changed"));
    }
  }
}

}  // namespace trireme
