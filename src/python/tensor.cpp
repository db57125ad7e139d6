// Partition rules for a Python model.
#include "python/tensor.h"

#include <nlohmann/json.hpp>

#include "trireme/base/json.h"

namespace trireme::python {
namespace {

/// (name, sizes, other names).
using Parameter = std::tuple<std::string, std::vector<int64_t>, std::vector<std::string>>;

std::string text_of_partition(const py::object& facts, const std::vector<Parameter>& parameters, int ranks,
                              const std::string& preset_model, const std::string& partition_config) {
  PartitionModel model = partition_model_of(facts).value_or(PartitionModel());
  for (const auto& [name, shape, tied] : parameters)
    model.parameters.push_back({.name = name, .shape = shape, .tied = tied});
  TensorParallelOptions options{.autotp_size = ranks, .preset_model = preset_model, .tp_plan = tp_plan_of(facts)};
  if (!partition_config.empty())
    options.partition_config = partition_config_from(parse_json(partition_config, "partition_config"));
  return partition_text(make_partition_plan(model, options));
}

}  // namespace

std::optional<PartitionModel> partition_model_of(const py::object& facts) {
  const auto config = facts.attr("config").cast<std::string>();
  if (config.empty()) return std::nullopt;
  return partition_model_from(parse_json(config, "the model's config"));
}

std::vector<std::pair<std::string, std::string>> tp_plan_of(const py::object& facts) {
  return facts.attr("tp_plan").cast<std::vector<std::pair<std::string, std::string>>>();
}

void set_facts(InitializeOptions& options, const py::object& facts) {
  if (facts.is_none()) return;
  options.partition_model = partition_model_of(facts);
  options.tp_plan = tp_plan_of(facts);
}

void bind_tensor(py::module_& module) {
  module.def("partition_text", &text_of_partition, py::arg("facts"), py::arg("parameters"), py::arg("ranks"),
             py::arg("preset_model"), py::arg("partition_config"));
}

}  // namespace trireme::python
