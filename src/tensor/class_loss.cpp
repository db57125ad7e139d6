#include "tensor/class_loss.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

namespace trireme::tensor {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr const char* kName = "aten::cross_entropy_loss in forward";

struct Loss final : torch::CustomClassHolder {
  Loss(std::shared_ptr<AxisExchanges> exchanges, Cut cut) : exchanges(std::move(exchanges)), cut(std::move(cut)) {}
  std::shared_ptr<AxisExchanges> exchanges;
  Cut cut;
};
using LossPointer = c10::intrusive_ptr<Loss>;

/// Place of each target in this rank's columns, 0 where it is on another rank, and whether it is here.
std::pair<at::Tensor, at::Tensor> places_of(const at::Tensor& targets, const Cut& cut, int rank) {
  at::Tensor places = at::zeros_like(targets), here = at::zeros(targets.sizes(), targets.options().dtype(at::kBool));
  int64_t before = 0;
  for (const Interval& one : cut.ranges->of_rank(rank)) {
    const at::Tensor inside = targets.ge(one.begin).logical_and(targets.lt(one.end));
    places = at::where(inside, targets - (one.begin - before), places);
    here = here.logical_or(inside);
    before += one.size();
  }
  return {places, here};
}

struct CrossEntropy : Function<CrossEntropy> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& logits, const at::Tensor& targets,
                            const LossPointer& exchange, int64_t ignored, double smoothing) {
    const Cut& cut = exchange->cut;
    const auto [places, here] = places_of(targets, cut, exchange->exchanges->group().rank());
    const at::Tensor wide = logits.to(logits.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
    const at::Tensor greatest = exchange->exchanges->all_reduce(wide.amax(1), kName, ReduceOp::kMax);
    at::Tensor shifted = wide - greatest.unsqueeze(1);
    const at::Tensor picked = shifted.gather(1, places.unsqueeze(1)).squeeze(1).masked_fill(here.logical_not(), 0);
    std::vector<at::Tensor> sums = {picked};
    if (smoothing > 0) sums.push_back(shifted.sum(1));
    at::Tensor weights = shifted.exp_();
    sums.push_back(weights.sum(1));
    const at::Tensor all = exchange->exchanges->all_reduce(at::stack(sums), kName);
    const at::Tensor total = all[all.size(0) - 1];
    const at::Tensor normalizer = total.log();
    at::Tensor losses = normalizer - all[0];
    if (smoothing > 0)
      losses = losses * (1 - smoothing) + (normalizer - all[1] / static_cast<double>(cut.whole())) * smoothing;
    const at::Tensor is_ignored = targets.eq(ignored);
    weights.div_(total.unsqueeze(1));
    context->save_for_backward({weights, places, here, is_ignored});
    context->saved_data["smoothing"] = smoothing;
    context->saved_data["classes"] = cut.whole();
    context->saved_data["dtype"] = static_cast<int64_t>(logits.scalar_type());
    return losses.masked_fill(is_ignored, 0).to(logits.scalar_type());
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list kept = context->get_saved_variables();
    const at::Tensor &weights = kept[0], &places = kept[1], &here = kept[2], &is_ignored = kept[3];
    const double smoothing = context->saved_data["smoothing"].toDouble();
    const auto classes = static_cast<double>(context->saved_data["classes"].toInt());
    at::Tensor gradient = weights.clone();
    if (smoothing > 0) gradient.sub_(smoothing / classes);
    const at::Tensor hit = here.to(gradient.scalar_type()).mul(smoothing - 1).unsqueeze(1);
    gradient.scatter_add_(1, places.unsqueeze(1), hit);
    const at::Tensor of_losses = gradients[0].to(gradient.scalar_type()).masked_fill(is_ignored, 0).unsqueeze(1);
    gradient.mul_(of_losses);
    return {gradient.to(static_cast<at::ScalarType>(context->saved_data["dtype"].toInt())), {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, const Cut& cut, int64_t ignored,
                         double label_smoothing, const std::shared_ptr<AxisExchanges>& exchanges) {
  return CrossEntropy::apply(logits, targets, c10::make_intrusive<Loss>(exchanges, cut), ignored, label_smoothing);
}

}  // namespace trireme::tensor
