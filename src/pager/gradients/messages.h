// Messages by which the ranks of a mesh's shards exchange the gradients that they have summed.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "pager/gradients/mesh_context.h"
#include "pager/weights/flat_buffers.h"

namespace trireme {

class GradientMessages {
 public:
  /// `sums_stay`: where they are, from one window to the next. Collective over the shards.
  GradientMessages(const MeshContext& context, bool sums_stay);

  /// In which they travel: gathers of weights that backward issues in between do not share a sequence with reductions.
  Group& group() const { return *group_; }
  /// Message of `sum`, the gradients of unit `index`: `sum` itself where it can travel from there. The message before
  /// the last one is over on the current stream.
  at::Tensor of(int index, const at::Tensor& sum);
  /// For the shard that comes of it [numel], until the message after the next.
  at::Tensor reduced(int index);
  int64_t registered_bytes() const { return sent_.registered_bytes() + received_.registered_bytes(); }

 private:
  /// Whether NCCL can reduce `unit`'s sums, and not where they are.
  bool needs_buffer(const UnitLayout& unit) const;

  const MeshContext& context_;
  const bool sums_stay_;
  const std::unique_ptr<Group> group_;
  AlternatingBuffers sent_, received_;  // none: what travels is not registered
};

}  // namespace trireme
