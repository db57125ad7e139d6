// The measured cost of each layer of a model.
#pragma once

#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "trireme/pipeline/pipeline_module.h"

namespace trireme {

struct LayerProfile {
  double seconds = 0;            ///< of a forward and a backward pass; the shortest of three
  int64_t parameter_bytes = 0;   ///< 0 for a tied layer after the first
  int64_t activation_bytes = 0;  ///< allocated in forward and kept for backward, outputs included
};

/// Builds each layer for the moment, in order, and measures it on what the one before returned; the first takes
/// `input`. The generators stay where they are. For layers on the host.
/// Throws    ConfigError: a layer that fails, by its number and class.
std::vector<LayerProfile> profile_layers(const std::vector<LayerSpec>& layers, const c10::IValue& input);

}  // namespace trireme
