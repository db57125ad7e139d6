// What Python knows of a model for partition rules: trireme/tensor/model_facts.py's ModelFacts.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "trireme/tensor/partition.h"

namespace trireme::python {

/// Without parameters; nothing: the model has no configuration.
std::optional<PartitionModel> partition_model_of(const py::object& facts);
std::vector<std::pair<std::string, std::string>> tp_plan_of(const py::object& facts);

/// Tells an engine's options, of a library whose engines cut layers, what rules need. None: nothing.
template <typename Options>
void set_facts(Options& options, const py::object& facts) {
  if (facts.is_none()) return;
  if constexpr (requires { options.partition_model; }) options.partition_model = partition_model_of(facts);
  if constexpr (requires { options.tp_plan; }) options.tp_plan = tp_plan_of(facts);
}

}  // namespace trireme::python
