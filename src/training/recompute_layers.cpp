#include "training/recompute_layers.h"

#include <torch/nn/module.h>

#include "trireme/base/error.h"
#include "trireme/recompute/recompute.h"

namespace trireme {

void recompute_layers(torch::nn::Module& module, RecomputeMode mode) {
  bool any = false;
  const auto visit = [&](torch::nn::Module& part) {
    auto* layers = dynamic_cast<RecomputesLayers*>(&part);
    if (layers == nullptr) return;
    layers->recompute_layers(mode == RecomputeMode::kFull);
    any = true;
  };
  visit(module);
  for (const auto& part : module.modules(/*include_self=*/false)) visit(*part);
  if (mode != RecomputeMode::kFull || any) return;
  throw ConfigError(
      str("`trireme.recompute` = \"full\": module '", module.name(),
          "' does not say where its layers begin: it has no list of modules of one class (Python), or does not derive "
          "from trireme::RecomputesLayers (C++); write \"selective\", or call trireme::recompute() or "
          "trireme.checkpointing.checkpoint() around its layers and write \"none\""));
}

}  // namespace trireme
