#include "pager/gradients/messages.h"

#include <algorithm>

namespace trireme {

GradientMessages::GradientMessages(const MeshContext& context, bool sums_stay)
    : context_(context),
      sums_stay_(sums_stay),
      group_(context.ranks.shards.clone(context.ranks.shards.name() + "/gradients")) {
  if (!registers_buffers(context) || context.policy.deterministic) return;
  int64_t longest = 0, longest_shard = 0;
  for (const UnitLayout& unit : context.layout.units) {
    if (!unit.trainable || !needs_buffer(unit)) continue;
    const at::ScalarType kept = accumulation_dtype(unit, context.policy);
    longest = std::max(longest, bytes_in_slab(unit.numel(), wire_dtype(unit, kept)));
    if (!sums_stay) longest_shard = std::max(longest_shard, bytes_in_slab(unit.shard_numel, kept));
  }
  sent_ = AlternatingBuffers(*group_, context.device, longest);
  received_ = AlternatingBuffers(*group_, context.device, longest_shard);
}

// Sums of one backward come at a place of their own each time. What is to be widened while it is reduced is for others.
bool GradientMessages::needs_buffer(const UnitLayout& unit) const {
  const at::ScalarType kept = accumulation_dtype(unit, context_.policy);
  if (wire_dtype(unit, kept) == kept) return !sums_stay_;
  return sums_stay_ && context_.policy.stage == 0;
}

at::Tensor GradientMessages::of(int index, const at::Tensor& sum) {
  if (!is_host(context_.device) && group_->size() == 1 && !context_.policy.deterministic) return sum;
  const UnitLayout& unit = context_.unit(index);
  const at::ScalarType wire = wire_dtype(unit, sum.scalar_type());
  return sent_.are_there() && needs_buffer(unit) ? sent_.next(sum.numel(), wire).copy_(sum) : sum.to(wire);
}

at::Tensor GradientMessages::reduced(int index) {
  const UnitLayout& unit = context_.unit(index);
  if (received_.are_there() && needs_buffer(unit))
    return received_.next(unit.shard_numel, accumulation_dtype(unit, context_.policy));
  return context_.zeros(index, unit.shard_numel);
}

}  // namespace trireme
