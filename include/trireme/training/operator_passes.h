// The passes over a model's operators that its configuration asks for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/activations/cut_activations.h"
#include "trireme/config/config.h"
#include "trireme/pager/pager.h"
#include "trireme/recompute/selective.h"
#include "trireme/recompute/tiled.h"

namespace trireme {

/// The passes, on while this lives: as long as the Training, because losses are computed outside of forward().
struct OperatorPasses {
  OperatorPasses() = default;
  /// Those that need no other rank. `pager` outlives this.
  OperatorPasses(const Config& config, const Pager& pager);

  /// To call before the backward pass of `loss`. Throws StateError: gradients would be of a part of the loss.
  void check_loss(const at::Tensor& loss) const;
  /// As CutActivations has them, of whichever axis cuts `tensor`.
  bool is_part(const at::Tensor& tensor) const;
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor) const;
  SentTensor sent(const at::Tensor& tensor) const;
  at::Tensor taken(const at::Tensor& tensor, const std::string& cut) const;
  at::Tensor whole(const at::Tensor& tensor) const;
  /// The pass of class Pass; null: nothing is cut by it.
  template <class Pass>
  Pass* find() const {
    for (const auto& cut : cuts)
      if (auto* const found = dynamic_cast<Pass*>(cut.get())) return found;
    return nullptr;
  }

  // Null: the configuration does not ask for it.
  std::unique_ptr<SelectiveRecompute> recompute;
  std::unique_ptr<TiledComputation> tiled;
  std::vector<std::unique_ptr<CutActivations>> cuts;  ///< one for each axis along which activations are cut
};

}  // namespace trireme
