// Layers that peft has wrapped, as rules see them: by the names that they had before.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "trireme/tensor/partition.h"

namespace trireme::tensor {

/// Prefix of the names of all parameters of a model inside of peft's.
inline constexpr const char* kPeftPrefix = "base_model.model.";

/// `x.base_layer.weight`, `x.original_module.weight` and `x.modules_to_save.NAME.weight` were `x.weight`. What else is
/// in a module with a `base_layer` is its adapter, of which rules know nothing.
class WrappedLayers {
 public:
  explicit WrappedLayers(const PartitionModel& model);

  /// The layer of which `parameter` is an adapter; "": none.
  std::string adapted_by(const std::string& parameter) const;
  /// The model without wrappers and adapters.
  PartitionModel unwrapped(const PartitionModel& model) const;
  /// `plan`, made for unwrapped(model), becomes the plan of `model`: with its names, and adapters whole on every rank.
  void wrap(PartitionPlan& plan, const PartitionModel& model) const;

 private:
  std::set<std::string> layers_;  ///< modules that have a `base_layer`
};

}  // namespace trireme::tensor
