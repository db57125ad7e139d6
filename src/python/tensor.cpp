// Partition rules for a Python model.
#include "python/tensor.h"

#include <memory>
#include <utility>

#include "python/json.h"
#include "trireme/base/error.h"
#include "trireme/tensor/partition_rule.h"

namespace trireme::python {
namespace {

/// (name, sizes, other names).
using Parameter = std::tuple<std::string, std::vector<int64_t>, std::vector<std::string>>;

std::string text_of_partition(const py::object& facts, const std::vector<Parameter>& parameters, int ranks,
                              const std::string& preset_model, const std::optional<Json>& partition_config) {
  PartitionModel model = partition_model_of(facts).value_or(PartitionModel());
  for (const auto& [name, shape, tied] : parameters)
    model.parameters.push_back({.name = name, .shape = shape, .tied = tied});
  TensorParallelOptions options{.autotp_size = ranks, .preset_model = preset_model, .tp_plan = tp_plan_of(facts)};
  if (partition_config) options.partition_config = partition_config_from(*partition_config);
  return partition_text(make_partition_plan(model, options));
}

constexpr const char* kSum = "sum";

int64_t dim_of_result(const std::string& op, const py::handle& dim) {
  if (py::isinstance<py::int_>(dim)) return dim.cast<int64_t>();
  if (py::isinstance<py::str>(dim) && dim.cast<std::string>() == kSum) return kSumOfRanks;
  throw ConfigError(str("the rule for \"", op, "\" gives ", py::repr(dim).cast<std::string>(),
                        " for a result; expected a dim or \"sum\""));
}

/// `rule` gives None or ({argument: dim}, [dim of each result or "sum"]).
void register_rule(const std::string& op, py::object rule) {
  if (!PyCallable_Check(rule.ptr()))
    throw ConfigError(str("register_partition_rule: the rule for \"", op, "\" is ", py::repr(rule).cast<std::string>(),
                          "; expected a function of a call"));
  // Never freed: passes of other threads, which have not this lock, may hold it last.
  const py::handle held = rule.release();
  register_partition_rule(op, [op, held](const PartitionCall& call) -> std::optional<PartitionAnswer> {
    const py::gil_scoped_acquire gil;
    const py::object given = held(py::cast(&call, py::return_value_policy::reference));
    if (given.is_none()) return {};
    if (!py::isinstance<py::tuple>(given) || py::len(given) != 2)
      throw ConfigError(str("the rule for \"", op, "\" gives ", py::repr(given).cast<std::string>(),
                            "; expected None or ({argument: dim}, [dim or \"sum\"])"));
    PartitionAnswer answer;
    for (const auto& [index, dim] : py::cast<std::map<size_t, int64_t>>(given[py::int_(0)]))
      answer.arguments[index] = dim;
    for (const py::handle dim : given[py::int_(1)]) answer.results.push_back(dim_of_result(op, dim));
    return answer;
  });
}

/// An argument that is no tensor.
py::object number_of(const PartitionCall& call, size_t index) {
  const c10::IValue& value = call.argument(index);
  if (value.isNone()) return py::none();
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isIntList()) return py::cast(value.toIntVector());
  if (value.isDoubleList()) return py::cast(value.toDoubleVector());
  throw py::type_error(str(call.name(), ": argument ", index, " is of type ", value.tagKind(),
                           "; a rule reads numbers, texts and lists of numbers"));
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
  if (py::isinstance<py::set>(facts)) {
    options.own_slices = facts.cast<std::set<std::string>>();
    return;
  }
  options.partition_model = partition_model_of(facts);
  options.tp_plan = tp_plan_of(facts);
}

void bind_tensor(py::module_& module) {
  module.def("partition_text", &text_of_partition, py::arg("facts"), py::arg("parameters"), py::arg("ranks"),
             py::arg("preset_model"), py::arg("partition_config"));
  const auto at = [](const PartitionCall& call, size_t index) {
    if (index >= call.arguments()) throw py::index_error(str(call.name(), " has ", call.arguments(), " arguments"));
    return index;
  };
  py::class_<PartitionCall>(module, "PartitionCall")
      .def_property_readonly("name", &PartitionCall::name)
      .def_property_readonly("results", &PartitionCall::results)
      .def_property_readonly("writes_first", &PartitionCall::writes_first)
      .def("__len__", &PartitionCall::arguments)
      .def("is_tensor", [at](const PartitionCall& call, size_t index) { return call.is_tensor(at(call, index)); })
      .def("cut_dim", [at](const PartitionCall& call, size_t index) { return call.cut_dim(at(call, index)); })
      .def("sizes",
           [at](const PartitionCall& call, size_t index) {
             if (!call.is_tensor(at(call, index))) throw py::type_error(str("argument ", index, " is no tensor"));
             return call.sizes(index);
           })
      .def("value", [at](const PartitionCall& call, size_t index) {
        if (call.is_tensor(at(call, index))) throw py::type_error(str("argument ", index, " is a tensor"));
        return number_of(call, index);
      });
  module.def("register_partition_rule", &register_rule, py::arg("op"), py::arg("rule"));
}

}  // namespace trireme::python
