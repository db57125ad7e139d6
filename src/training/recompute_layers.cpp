#include "training/recompute_layers.h"

#include <torch/nn/module.h>

#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/parallel/exclusions.h"
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
  throw ConfigError(filled(kNoLayers, {module.name()}));
}

}  // namespace trireme
