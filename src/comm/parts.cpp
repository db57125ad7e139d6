#include "trireme/comm/parts.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>

#include "trireme/intercept.h"

namespace trireme {

namespace {

/// `slice`, which has the elements of `part`, goes to its places in `whole`.
void place_part(const at::Tensor& whole, const TensorPart& part, const at::Tensor& slice) {
  int64_t begin = 0;
  for (const Interval& interval : part.intervals) {
    whole.narrow(part.dim, interval.begin, interval.size()).copy_(slice.narrow(part.dim, begin, interval.size()));
    begin += interval.size();
  }
}

}  // namespace

at::Tensor cut_part(const at::Tensor& whole, const TensorPart& part) {
  const WithoutInterception own_operators;
  if (part.dim < 0) return whole.contiguous();
  std::vector<at::Tensor> pieces;
  for (const Interval& own : part.intervals) pieces.push_back(whole.narrow(part.dim, own.begin, own.size()));
  return at::cat(pieces, part.dim).contiguous();
}

at::Tensor join_parts(Group& group, const std::vector<TensorPart>& parts, const at::Tensor& own) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const auto is_whole = [](const TensorPart& part) { return part.dim < 0; };
  if (std::all_of(parts.begin(), parts.end(), is_whole)) return own;
  const at::Tensor whole = at::empty(parts.front().shape, own.options());
  for (auto holder = static_cast<int>(parts.size()) - 1; holder >= 0; --holder) {
    const TensorPart& part = parts[static_cast<size_t>(holder)];
    if (std::find(parts.begin(), parts.begin() + holder, part) != parts.begin() + holder) continue;
    const at::Tensor slice =
        holder == group.rank() ? own : at::empty(local_shape(part), own.options().requires_grad(false));
    group.broadcast(slice, holder).wait();
    place_part(whole, part, slice);
  }
  return whole;
}

}  // namespace trireme
