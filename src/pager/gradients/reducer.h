// How the ranks of a mesh make shards of the sum out of what each has sent in a backward pass.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "pager/gradients/gradient_scale.h"
#include "pager/gradients/home.h"
#include "pager/gradients/messages.h"

namespace trireme {

/// The reduction of one unit's bucket, under way.
struct Reduction {
  int unit;
  bool is_first;  ///< of its unit in this window
  at::Tensor input;
  at::Tensor output = {};
  Pending<void> pending = {};
};

class GradientReducer {
 public:
  virtual ~GradientReducer() = default;
  GradientReducer(const GradientReducer&) = delete;
  GradientReducer& operator=(const GradientReducer&) = delete;

  /// Sets output and pending. Collective where there are peers.
  virtual void start(Reduction& reduction) = 0;
  /// `reduction` is over: its output goes home.
  virtual void complete(const Reduction& reduction) = 0;
  /// All reductions so far are complete. `sent`, by unit: something of this window was. Collective.
  virtual void finish(const std::vector<uint8_t>& sent) = 0;

 protected:
  GradientReducer(const MeshContext& context, const GradientScale& scale, GradientMessages& messages,
                  GradientHome& home)
      : context_(context), scale_(scale), messages_(messages), home_(home) {}

  const MeshContext& context_;
  const GradientScale& scale_;
  GradientMessages& messages_;
  GradientHome& home_;
};

/// Ranks' sums are added while they travel; each pass adds to the shard.
std::unique_ptr<GradientReducer> make_summing(const MeshContext& context, const GradientScale& scale,
                                              GradientMessages& messages, GradientHome& home);
/// PagerPolicy::deterministic: each rank adds the gradients of rank 0, 1, 2, … to its shard, micro-batch by
/// micro-batch. finish(), once in a window, multiplies with the factor, and gathers the shards at ZeRO stage 0.
std::unique_ptr<GradientReducer> make_folding(const MeshContext& context, const GradientScale& scale,
                                              GradientMessages& messages, GradientHome& home);

}  // namespace trireme
