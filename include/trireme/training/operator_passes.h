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

/// A pass that cuts activations, along one axis or several.
struct CuttingPass {
  std::vector<std::unique_ptr<CutActivations>> axes;  ///< the outermost first

  /// The one that is asked about tensors: each axis knows what the pass knows.
  CutActivations& of_tensors() const { return *axes.front(); }
};

/// The passes, on while this lives: as long as the Training, because losses are computed outside of forward().
struct OperatorPasses {
  OperatorPasses() = default;
  /// Those that need no other rank. `pager` outlives this.
  OperatorPasses(const Config& config, const Pager& pager);

  /// To call before the backward pass of `loss`. Throws StateError: gradients would be of a part of the loss.
  void check_loss(const at::Tensor& loss) const;
  /// As CutActivations has them, of whichever pass cuts `tensor`.
  bool is_part(const at::Tensor& tensor) const;
  std::optional<std::vector<int64_t>> whole_sizes(const at::Tensor& tensor) const;
  SentTensor sent(const at::Tensor& tensor) const;
  at::Tensor taken(const at::Tensor& tensor, const std::string& cut) const;
  at::Tensor whole(const at::Tensor& tensor) const;
  /// As CutActivations has them, of all axes.
  void count_exchanges(bool counts = true) const;
  std::vector<ExchangeRow> exchanges() const;
  /// The axis of class Axis; null: nothing is cut along it.
  template <class Axis>
  Axis* find() const {
    for (const CuttingPass& pass : cuts)
      for (const auto& axis : pass.axes)
        if (auto* const found = dynamic_cast<Axis*>(axis.get())) return found;
    return nullptr;
  }

  // Null: the configuration does not ask for it.
  std::unique_ptr<SelectiveRecompute> recompute;
  std::unique_ptr<TiledComputation> tiled;
  std::vector<CuttingPass> cuts;  ///< along other axes each
};

}  // namespace trireme
