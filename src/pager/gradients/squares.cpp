#include "pager/gradients/squares.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "pager/gradients/store.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

// Whether this rank counts all parameters of `unit`.
bool is_all_counted(const StoreContext& context, int unit) {
  const std::vector<ParameterPlace>& placements = context.unit(unit).parameters;
  return std::all_of(placements.begin(), placements.end(),
                     [&](const ParameterPlace& each) { return context.parameters[each.index].is_all_counted(); });
}

}  // namespace

ExactSum squares_on_host(const StoreContext& context, const GradientStores& gradients) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  ExactSum squares;
  for (int i = 0; i < static_cast<int>(context.parameters.size()); ++i) {
    GradientStore& store = *gradients[context.unit(context.parameters[i].unit).mesh];
    if (store.touched(i)) store.home().add_squares(i, squares);
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
    norms.push_back(gradients[unit.mesh]->home().norm_on_device(slice.unit));
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

at::Tensor counted_norm(const StoreContext& context, int unit, const at::Tensor& gradients) {
  if (is_all_counted(context, unit)) return at::_foreach_norm({gradients}, 2, at::kDouble)[0];
  std::vector<at::Tensor> counted;
  const int64_t begin = context.piece_begin(unit);
  for (const ParameterPlace& placement : context.unit(unit).parameters) {
    const ManagedParameter& parameter = context.parameters[placement.index];
    for (const Overlap& mine : counted_within(parameter, overlap(parameter, begin, begin + gradients.numel())))
      counted.push_back(gradients.narrow(0, mine.begin - begin, mine.numel()));
  }
  if (counted.empty()) return at::zeros({}, gradients.options().dtype(at::kDouble));
  return at::linalg_vector_norm(at::stack(at::_foreach_norm(counted, 2, at::kDouble)));
}

}  // namespace trireme
