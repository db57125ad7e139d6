#include "pager/gradients/bucket.h"

namespace trireme {

namespace {

at::Tensor part_of(const at::Tensor& sum, const Placement& placement) {
  return sum.narrow(0, placement.begin, placement.numel);
}

}  // namespace

void Bucket::begin(const UnitLayout& unit) {
  seen.assign(unit.parameters.size(), 0);
  arrived = 0;
}

void Bucket::add(const UnitLayout& unit, int position, const at::Tensor& gradient) {
  at::Tensor target = part_of(sum, unit.parameters[position]);
  if (seen[position]) {
    target.add_(gradient);
    return;
  }
  target.copy_(gradient);
  seen[position] = 1;
  ++arrived;
}

at::Tensor Bucket::sum_of(const UnitLayout& unit, int position) const {
  if (seen.empty() || !seen[position]) return {};
  return part_of(sum, unit.parameters[position]);
}

void Bucket::zero_what_is_missing(const UnitLayout& unit) {
  for (size_t i = 0; i < seen.size(); ++i)
    if (!seen[i]) part_of(sum, unit.parameters[i]).zero_();
}

}  // namespace trireme
