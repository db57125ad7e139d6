#include "pager/gradients/squares.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "pager/gradients/counted_norm.h"
#include "trireme/intercept.h"

namespace trireme {

ExactSum squares_on_host(const StoreContext& context, const GradientStores& gradients) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  ExactSum squares;
  for (int i = 0; i < static_cast<int>(context.parameters.size()); ++i) {
    const GradientStore& store = *gradients[context.unit(context.parameters[i].unit).mesh];
    if (store.touched(i)) store.add_squares(i, squares);
  }
  return squares;
}

// The squares of this rank's own shards, at ZeRO stage 0 too, so that the bits do not depend on the stage.
at::Tensor squares_on_device(const StoreContext& context, const std::vector<OwnedSlice>& owned,
                             const GradientStores& gradients) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  if (owned.empty()) return at::empty({0}, at::TensorOptions().dtype(at::kDouble).device(context.device));
  std::vector<at::Tensor> norms, shards;
  for (const OwnedSlice& slice : owned) {
    const UnitLayout& unit = context.unit(slice.unit);
    const ShardMesh& mesh = context.mesh(slice.unit);
    norms.push_back(gradients[unit.mesh]->norm_on_device(slice.unit));
    const bool counts = mesh.counts_in_norm && (unit.pieces > 1 || mesh.replica() == 0);
    if (!counts) norms.back() = at::zeros({}, at::TensorOptions().dtype(at::kDouble).device(context.device));
    if (norms.back().defined()) continue;
    const bool is_whole = slice.gradients.numel() > unit.piece_numel();
    const at::Tensor mine =
        is_whole ? slice.gradients.narrow(0, context.piece_begin(slice.unit), unit.piece_numel()) : slice.gradients;
    if (is_all_counted(context, slice.unit))
      shards.push_back(mine);
    else
      norms.back() = counted_norm(context, slice.unit, mine);
  }
  if (!shards.empty()) {
    const std::vector<at::Tensor> of_shards = at::_foreach_norm(shards, 2, at::kDouble);
    auto measured = of_shards.begin();
    for (at::Tensor& norm : norms)
      if (!norm.defined()) norm = *measured++;
  }
  return at::stack(norms).square();
}

}  // namespace trireme
