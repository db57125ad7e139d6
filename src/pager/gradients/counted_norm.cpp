#include "pager/gradients/counted_norm.h"

#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <vector>

namespace trireme {

bool is_all_counted(const StoreContext& context, int unit) {
  const std::vector<Placement>& placements = context.unit(unit).parameters;
  return std::all_of(placements.begin(), placements.end(),
                     [&](const Placement& each) { return context.parameters[each.index].is_all_counted(); });
}

at::Tensor counted_norm(const StoreContext& context, int unit, const at::Tensor& gradients) {
  if (is_all_counted(context, unit)) return at::_foreach_norm({gradients}, 2, at::kDouble)[0];
  std::vector<at::Tensor> counted;
  const int64_t begin = context.piece_begin(unit);
  for (const Placement& placement : context.unit(unit).parameters) {
    const ManagedParameter& parameter = context.parameters[placement.index];
    for (const Overlap& mine : counted_within(parameter, overlap(parameter, begin, begin + gradients.numel())))
      counted.push_back(gradients.narrow(0, mine.begin - begin, mine.numel()));
  }
  if (counted.empty()) return at::zeros({}, gradients.options().dtype(at::kDouble));
  return at::linalg_vector_norm(at::stack(at::_foreach_norm(counted, 2, at::kDouble)));
}

}  // namespace trireme
