#include "trireme/training/gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "trireme/intercept.h"

namespace trireme {

namespace {

/// Calls `visit` with this rank's elements of each parameter that has a gradient.
template <class Visit>
void for_each_part(Pager& pager, const Visit& visit) {
  for (const OwnedSlice& slice : pager.owned()) {
    pager.await_owned(slice.unit);
    for (const ParameterRange& range :
         ranges_of(pager.layout().units[slice.unit], slice.begin, slice.gradients.numel()))
      if (pager.has_gradient(range.parameter)) visit(slice.gradients.narrow(0, range.slice_begin, range.numel));
  }
}

}  // namespace

int copies_of_gradients(const Training& training) {
  const ParallelPlan& plan = training.groups().plan;
  if (training.pager().policy().stage == 0) return plan.sums.size();
  return plan.states_over_replicas ? 1 : plan.along(replica_axis().name).size();
}

double norm_of_gradients(Training& training) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  training.pager().reduce_now();
  const at::Tensor squares = at::zeros({1}, at::kDouble);
  for_each_part(training.pager(),
                [&](const at::Tensor& part) { squares.add_(part.to(at::kDouble).square().sum().cpu()); });
  training.groups().sums.all_reduce(squares).wait();
  return std::sqrt(squares.item<double>() / copies_of_gradients(training));
}

void scale_gradients(Training& training, double factor) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  Pager& pager = training.pager();
  for_each_part(pager, [&](at::Tensor part) { part.mul_(factor); });
  for (size_t i = 0; i < pager.parameters().size(); ++i)
    if (pager.has_gradient(static_cast<int>(i))) pager.gradient_written(static_cast<int>(i));
}

}  // namespace trireme
