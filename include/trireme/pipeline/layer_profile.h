// The measured cost of each layer of a model.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "trireme/pipeline/pipeline_module.h"

namespace trireme {

/// The cost of one layer.
struct LayerProfile {
  double seconds = 0;            ///< of a forward and a backward pass; the shortest of three
  int64_t parameter_bytes = 0;   ///< 0 for a tied layer after the first
  int64_t activation_bytes = 0;  ///< allocated in forward and kept for backward, outputs included
};

/// Builds each layer in turn, measures it on the output of the one before (the first on `input`) and drops it. Random
/// number generators are as before afterwards. For layers on the host.
/// Throws    ConfigError: a layer that fails, by its number and class.
std::vector<LayerProfile> profile_layers(const std::vector<LayerSpec>& layers, const c10::IValue& input);

}  // namespace trireme
