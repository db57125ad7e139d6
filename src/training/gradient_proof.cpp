#include "training/gradient_proof.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
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

/// A number that two ranks share only where they have the same part of a parameter.
double place_of(const TensorPart& part) {
  double place = part.dim + 2;
  for (const Interval& one : part.intervals)
    place = place * 31 + static_cast<double>(one.begin % 8191) * 7 + static_cast<double>(one.end % 8191);
  return std::fmod(place, 1 << 20);
}

/// By parameter, of this rank's gradients: the sum of squares, and the product with a fixed vector.
at::Tensor numbers_of_gradients(Pager& pager) {
  const at::Tensor own = at::zeros({static_cast<int64_t>(pager.parameters().size()), 2}, at::kDouble);
  for (const OwnedSlice& slice : pager.owned()) {
    pager.await_owned(slice.unit);
    for (const ParameterRange& range :
         ranges_of(pager.layout().units[slice.unit], slice.begin, slice.gradients.numel())) {
      const at::Tensor gradient = slice.gradients.narrow(0, range.slice_begin, range.numel).to(at::kDouble);
      const at::Tensor vector =
          at::arange(range.parameter_begin, range.parameter_begin + range.numel, gradient.options())
              .mul_(0.7)
              .add_(range.parameter)
              .sin_();
      own[range.parameter][0] += gradient.square().sum().cpu();
      own[range.parameter][1] += gradient.mul(vector).sum().cpu();
    }
  }
  return own;
}

/// Whether all ranks have the same gradient, not 0, by their numbers [ranks, 3].
bool is_alike(const at::Tensor& of_ranks) {
  const auto numbers = of_ranks.accessor<double, 2>();
  bool alike = numbers[0][0] > 0;
  for (int64_t rank = 1; rank < of_ranks.size(0); ++rank)
    for (const int64_t number : {0, 1})
      alike &= std::abs(numbers[rank][number] - numbers[0][number]) <= kOfAllNorms * std::abs(numbers[0][number]);
  return alike;
}

bool any(Group& model, bool own) {
  const at::Tensor verdict = at::full({1}, own ? 1 : 0, at::kLong);
  model.all_reduce(verdict, ReduceOp::kMax).wait();
  return verdict.item<int64_t>() != 0;
}

/// Throws StateError on every rank of the model where one has a problem.
void require_none(Group& model, const std::string& problem) {
  if (any(model, !problem.empty()))
    throw StateError(str("step: ", problem.empty() ? "gradients are wrong, as other ranks of the model say" : problem,
                         ". No weight has changed"));
}

}  // namespace

GradientProof::GradientProof(Pager& pager, Group& shards, Group& slices, Group& model, std::string axis,
                             const PartitionPlan& plan, CutActivations* pass)
    : pager_(pager), shards_(shards), slices_(slices), model_(model), axis_(std::move(axis)), pass_(pass) {
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
  const at::Tensor own = at::zeros({count, 3}, at::kDouble);  // sum of squares, product, place of the slice
  own.narrow(1, 0, 2).copy_(numbers_of_gradients(pager_));
  for (int64_t i = 0; i < count; ++i) own[i][2] = place_of(pager_.parameters()[static_cast<size_t>(i)].part);
  const at::Tensor places = own.select(1, 2).clone();
  shards_.all_reduce(own).wait();
  std::string problem;
  for (int64_t i = 0; i < count && problem.empty(); ++i)
    if (own[i][2].item<double>() != places[i].item<double>() * shards_.size())
      problem = str("ranks of group '", shards_.name(), "', which add up gradients of \"",
                    pager_.parameters()[static_cast<size_t>(i)].name,
                    "\", have other slices of it; ranks at one place of the axis \"", axis_, "\" have the same");
  const at::Tensor all = at::empty({slices_.size(), count, 3}, at::kDouble);
  slices_.all_gather(all.flatten(), own.flatten()).wait();
  if (any(model_, !all.isfinite().all().item<bool>())) return;  // a step that is skipped
  is_shown_ = true;
  const std::string exchange = pass_ != nullptr ? pass_->exchange_problem() : "";
  if (problem.empty() && !exchange.empty())
    problem = str("an exchange over group '", slices_.name(), "', on the axis \"", axis_, "\", is wrong: ", exchange);
  require_none(model_, problem.empty() ? problem_of(all) : problem);
}

/// Ranks that have the same elements and other gradients of them, from the numbers of all ranks of the tensor group;
/// "": there are none.
std::string GradientProof::problem_of(const at::Tensor& all) const {
  const auto numbers = all.accessor<double, 3>();
  const double all_norm = std::sqrt(all.select(2, 0).sum(1).max().item<double>());
  for (int64_t i = 0; i < all.size(1); ++i) {
    if (parameters_[static_cast<size_t>(i)] == nullptr) continue;
    const std::vector<TensorPart>& parts = parameters_[static_cast<size_t>(i)]->parts;
    if (pass_ == nullptr && parts[0] != parts[1] && is_alike(all.select(1, i)))
      return str("ranks of group '", slices_.name(), "', on the axis \"", axis_, "\", have the same gradient of \"",
                 parameters_[static_cast<size_t>(i)]->name,
                 "\", which own_slices names (Python: tensor_model_parallel = True), so that a norm would count it on "
                 "each of them; leave out what the program has whole, and give slices other values on each rank");
    for (int rank = 1; rank < slices_.size(); ++rank) {
      const auto first = std::find(parts.begin(), parts.end(), parts[static_cast<size_t>(rank)]) - parts.begin();
      if (first == rank) continue;
      const double norm = std::sqrt(std::max(numbers[first][i][0], numbers[rank][i][0]));
      const double other = std::sqrt(std::min(numbers[first][i][0], numbers[rank][i][0]));
      const double difference = std::max(norm - other, std::abs(numbers[first][i][1] - numbers[rank][i][1]));
      if (difference <= kOfOwnNorm * norm + kOfAllNorms * all_norm) continue;
      return str("ranks ", first, " and ", rank, " of group '", slices_.name(), "', on the axis \"", axis_,
                 "\", have the same elements of \"", parameters_[static_cast<size_t>(i)]->name,
                 "\" and other gradients of them, of norms ", std::sqrt(numbers[first][i][0]), " and ",
                 std::sqrt(numbers[rank][i][0]),
                 pass_ != nullptr
                     ? "; they get the same batches and random numbers, and what uses it on slices runs by libtorch's "
                       "operators inside of this engine's forward"
                     : "; a parameter that the program has cut stands in own_slices (Python: tensor_model_parallel = "
                       "True), and the program adds up its gradients of others over the axis \"model\"");
    }
  }
  return "";
}

void ReplicaProof::show() {
  if (is_shown_) return;
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const at::Tensor own = numbers_of_gradients(pager_);
  const at::Tensor all = at::empty({replicas_.size(), own.size(0), 2}, at::kDouble);
  replicas_.all_gather(all.flatten(), own.flatten()).wait();
  if (any(model_, !all.isfinite().all().item<bool>())) return;  // a step that is skipped
  is_shown_ = true;
  const auto numbers = all.accessor<double, 3>();
  const double all_norm = std::sqrt(all.select(2, 0).sum(1).max().item<double>());
  std::string problem;
  for (int rank = 1; rank < replicas_.size() && problem.empty(); ++rank)
    for (int64_t i = 0; i < own.size(0) && problem.empty(); ++i) {
      const double norm = std::sqrt(numbers[0][i][0]), other = std::sqrt(numbers[rank][i][0]);
      const double difference = std::max(std::abs(norm - other), std::abs(numbers[0][i][1] - numbers[rank][i][1]));
      if (!(difference > kOfOwnNorm * std::max(norm, other) + kOfAllNorms * all_norm)) continue;
      problem = str("a sum over the axis \"replica\" is wrong: ranks 0 and ", rank, " of group '", replicas_.name(),
                    "' hold the same shards and have gradients of \"", pager_.parameters()[static_cast<size_t>(i)].name,
                    "\" of norms ", norm, " and ", other);
    }
  require_none(model_, problem);
}

}  // namespace trireme
