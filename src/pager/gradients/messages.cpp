#include "pager/gradients/messages.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "pager/gradients/store.h"

namespace trireme {

GradientMessages::GradientMessages(Group& group, const StoreContext& context, bool sums_stay)
    : context_(context), sums_stay_(sums_stay), is_alone_on_device_(!is_host(context.device) && group.size() == 1) {
  if (!registers_buffers(context) || context.policy.deterministic) return;
  int64_t longest = 0, longest_shard = 0;
  for (const UnitLayout& unit : context.layout.units) {
    if (!unit.trainable || !needs_buffer(unit)) continue;
    const at::ScalarType kept = accumulation_dtype(unit, context.policy);
    longest = std::max(longest, bytes_in_slab(unit.numel(), wire_dtype(unit, kept)));
    if (!sums_stay) longest_shard = std::max(longest_shard, bytes_in_slab(unit.shard_numel, kept));
  }
  sent_ = AlternatingBuffers(group, context.device, longest);
  received_ = AlternatingBuffers(group, context.device, longest_shard);
}

// Sums of one backward come at a place of their own each time. What is to be widened while it is reduced is for others.
bool GradientMessages::needs_buffer(const UnitLayout& unit) const {
  const at::ScalarType kept = accumulation_dtype(unit, context_.policy);
  if (wire_dtype(unit, kept) == kept) return !sums_stay_;
  return sums_stay_ && context_.policy.stage == 0;
}

at::Tensor GradientMessages::of(const UnitLayout& unit, const at::Tensor& sum) {
  if (is_alone_on_device_ && !context_.policy.deterministic) return sum;
  const at::ScalarType wire = wire_dtype(unit, sum.scalar_type());
  return sent_.are_there() && needs_buffer(unit) ? sent_.next(sum.numel(), wire).copy_(sum) : sum.to(wire);
}

at::Tensor GradientMessages::reduced(const UnitLayout& unit) {
  const at::ScalarType kept = accumulation_dtype(unit, context_.policy);
  if (received_.are_there() && needs_buffer(unit)) return received_.next(unit.shard_numel, kept);
  return at::zeros({unit.shard_numel}, at::TensorOptions().dtype(kept).device(context_.device));
}

}  // namespace trireme
