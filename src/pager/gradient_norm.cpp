#include "pager/gradient_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "pager/exact_sum.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

using Stores = std::vector<std::unique_ptr<GradientStore>>;

/// The ranks' parts, added without rounding. Collective.
double sum_over_ranks(Group& group, const ExactSum& mine) {
  if (group.size() == 1) return mine.total();
  std::vector<ExactSum> all(group.size());
  constexpr auto kBytes = static_cast<int64_t>(sizeof(ExactSum));
  const at::TensorOptions options = at::TensorOptions().dtype(at::kByte);
  group
      .all_gather(at::from_blob(all.data(), {group.size() * kBytes}, options),
                  at::from_blob(const_cast<ExactSum*>(&mine), {kBytes}, options))
      .wait();
  ExactSum sum;
  for (const ExactSum& part : all) sum.add(part);
  return sum.total();
}

// Every rank adds up the shares of its own shards, at stage 0 too, so that the bits do not depend on the stage.
at::Tensor sum_on_device(Group& group, const StoreContext& context, const std::vector<OwnedSlice>& owned,
                         const Stores& gradients) {
  std::vector<at::Tensor> norms, shards;
  for (const OwnedSlice& slice : owned) {
    const UnitLayout& unit = context.unit(slice.unit);
    const ShardMesh& mesh = context.mesh(slice.unit);
    norms.push_back(gradients[unit.mesh]->norm_on_device(slice.unit));
    const bool counts = mesh.counts_in_norm && (unit.pieces > 1 || mesh.replica() == 0);
    if (!counts) norms.back() = at::zeros({}, slice.gradients.options().device(context.device).dtype(at::kDouble));
    if (norms.back().defined()) continue;
    const bool is_whole = slice.gradients.numel() > unit.piece_numel();
    shards.push_back(is_whole ? slice.gradients.narrow(0, context.piece_begin(slice.unit), unit.piece_numel())
                              : slice.gradients);
  }
  if (!shards.empty()) {
    const std::vector<at::Tensor> of_shards = at::_foreach_norm(shards, 2, at::kDouble);
    auto measured = of_shards.begin();
    for (at::Tensor& norm : norms)
      if (!norm.defined()) norm = *measured++;
  }
  const at::Tensor squares = at::stack(norms).square();
  if (group.size() == 1) return squares.sum();
  const at::Tensor all = at::empty({group.size() * squares.numel()}, squares.options());
  group.all_gather(all, squares).wait();
  return all.sum();
}

}  // namespace

at::Tensor sum_of_squares(Group& group, const StoreContext& context, const std::vector<OwnedSlice>& owned,
                          const Stores& gradients) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  if (!is_host(context.device) && !owned.empty()) return sum_on_device(group, context, owned, gradients);
  ExactSum mine;
  for (int i = 0; i < static_cast<int>(context.parameters.size()); ++i) {
    const GradientStore& store = *gradients[context.unit(context.parameters[i].unit).mesh];
    if (store.touched(i)) store.add_squares(i, mine);
  }
  return at::scalar_tensor(sum_over_ranks(group, mine), at::kDouble);
}

}  // namespace trireme
