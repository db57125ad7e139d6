// Names and shapes of a model's parameters, before it is made.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "trireme/models/language_model.h"
#include "trireme/pager/layout/layout.h"
#include "trireme/tensor/partition.h"

namespace trireme::cli {

/// The parameters of all layers of a built-in model, a tied one once.
std::vector<ParameterSpec> parameters_of(const ModelOptions& model, at::ScalarType dtype);

/// A built-in model, a config.json, or a folder of any family with a config.json and safetensors, as rules of the
/// tensor axis see it.
///
/// Throws    ConfigError: an unknown name, a file that is missing or unsupported.
struct ModelToPartition {
  PartitionModel model;
  std::vector<std::pair<std::string, std::string>> tp_plan = {};  ///< of its config.json: `base_model_tp_plan`
};
ModelToPartition model_to_partition(const std::string& name_or_path);
/// The same of options. `name` opens errors.
ModelToPartition model_to_partition(const ModelOptions& options, const std::string& name);

}  // namespace trireme::cli
