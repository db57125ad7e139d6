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

/// The first layer of each part, and the number of layers: of the partitions that stay within `options.memory_limit`,
/// the one whose slowest part is the fastest. A rank holds gradients and two states of an optimizer beside its
/// parameters, and activations of as many micro-batches as there are stages.
/// Throws    ConfigError: no partition stays within the limit.
std::vector<int64_t> partition_profiled(const std::vector<LayerProfile>& profiles,
                                        const PipelineModuleOptions& options);

}  // namespace trireme
