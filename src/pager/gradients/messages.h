// Messages by which ranks exchange the gradients that they have summed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "pager/weights/flat_buffers.h"
#include "pager/weights/store.h"

namespace trireme {

class GradientMessages {
 public:
  /// `sums_stay`: where they are, from one window to the next. Collective over `group`, in which messages are reduced.
  GradientMessages(Group& group, const StoreContext& context, bool sums_stay);

  /// Message of `sum`, the gradients of `unit`: `sum` itself where it can travel from there. The
  /// message before the last one is over on the current stream.
  at::Tensor of(const UnitLayout& unit, const at::Tensor& sum);
  /// For the shard that comes of it [numel], until the message after the next.
  at::Tensor reduced(const UnitLayout& unit);
  int64_t registered_bytes() const { return sent_.registered_bytes() + received_.registered_bytes(); }

 private:
  /// Whether NCCL can reduce `unit`'s sums, and not where they are.
  bool needs_buffer(const UnitLayout& unit) const;

  const StoreContext context_;
  const bool sums_stay_;
  const bool is_alone_on_device_;
  AlternatingBuffers sent_, received_;  // none: what travels is not registered
};

}  // namespace trireme
