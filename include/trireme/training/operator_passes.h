// The passes over a model's operators that its configuration asks for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "trireme/config/config.h"
#include "trireme/pager/pager.h"
#include "trireme/recompute/selective.h"
#include "trireme/recompute/tiled.h"
#include "trireme/sequence/sequence_parallel.h"
#include "trireme/tensor/tensor_parallel.h"
#include "trireme/training/groups.h"

namespace trireme {

/// The passes, on while this lives: as long as the Training, because losses are computed outside of forward().
struct OperatorPasses {
  OperatorPasses() = default;
  /// `pager` and `groups` outlive this. `tensor` knows the slices of layers that are cut; null: none are.
  OperatorPasses(const Config& config, const Pager& pager, const TrainingGroups& groups,
                 std::unique_ptr<TensorParallel> tensor);
  /// To call before the backward pass of `loss`. Throws StateError: gradients would be of a part of the loss.
  void check_loss(const at::Tensor& loss) const;

  /// From now on the program speaks of whole tensors where it has parts, as SequenceParallel and TensorParallel say.
  void speak_of_wholes() const;
  /// Whether `tensor` is a part or slice, of which only several ranks together have the whole.
  bool is_part(const at::Tensor& tensor) const;
  /// The whole of `tensor`, where it is a slice of a layer's; differentiable. Collective then over those who share the
  /// layer.
  at::Tensor whole(const at::Tensor& tensor) const;
  /// The sizes of the whole of a part or slice; nothing: `tensor` is neither.
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor) const;

  // Null: the configuration does not ask for it.
  std::unique_ptr<SelectiveRecompute> recompute;
  std::unique_ptr<TiledComputation> tiled;
  std::unique_ptr<SequenceParallel> sequence;
  std::unique_ptr<TensorParallel> tensor;
};

}  // namespace trireme
