// Facts of a Python model for partition rules: trireme/tensor/model_facts.py's ModelFacts.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/bindings.h"
#include "trireme/engine/options.h"
#include "trireme/tensor/partition.h"

namespace trireme::python {

/// Without parameters; nothing: the model has no configuration.
std::optional<PartitionModel> partition_model_of(const py::object& facts);
std::vector<std::pair<std::string, std::string>> tp_plan_of(const py::object& facts);

/// Tells an engine's options what rules need. None: nothing.
void set_facts(InitializeOptions& options, const py::object& facts);

}  // namespace trireme::python
