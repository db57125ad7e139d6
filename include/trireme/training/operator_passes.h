// The passes over a model's operators that its configuration asks for.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "trireme/config/config.h"
#include "trireme/pager/pager.h"
#include "trireme/recompute/selective.h"
#include "trireme/recompute/tiled.h"
#include "trireme/sequence/sequence_parallel.h"
#include "trireme/training/groups.h"

namespace trireme {

/// They live as long as the Training, because losses are computed outside of forward().
struct OperatorPasses {
  OperatorPasses() = default;
  /// `pager` and `groups` outlive this.
  OperatorPasses(const Config& config, const Pager& pager, const TrainingGroups& groups);
  /// Before the backward pass of `loss`. Throws StateError: gradients would be of a part of it.
  void check_loss(const at::Tensor& loss) const;

  // Null: the configuration does not ask for it.
  std::unique_ptr<SelectiveRecompute> recompute;
  std::unique_ptr<TiledComputation> tiled;
  std::unique_ptr<SequenceParallel> sequence;
};

}  // namespace trireme
