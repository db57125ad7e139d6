// What libtorch's operators mean, from the table.
#include "python/bindings.h"
#include "trireme/operators/row.h"

namespace trireme::python {
namespace {

/// None: the result is no number, or no join of parts' numbers.
std::optional<std::string> reduction_of(const OperatorMeaning& meaning) {
  switch (meaning.reduction.value_or(FactorKind::kWhole)) {
    case FactorKind::kSum:
      return "sum";
    case FactorKind::kMean:
      return "mean";
    case FactorKind::kMaximum:
      return "max";
    case FactorKind::kMinimum:
      return "min";
    case FactorKind::kAny:
      return "any";
    case FactorKind::kAll:
      return "all";
    default:
      return std::nullopt;
  }
}

}  // namespace

void bind_operators(py::module_& module) {
  py::class_<OperatorMeaning>(module, "OperatorMeaning")
      .def_readonly("is_each", &OperatorMeaning::is_each)
      .def_readonly("is_alias", &OperatorMeaning::is_alias)
      .def_readonly("reads_first", &OperatorMeaning::reads_first)
      .def_property_readonly("reduction", &reduction_of);
  module.def(
      "operator_meaning",
      [](const std::string& name, const std::string& overload) {
        const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
        return op ? meaning_of(*op) : OperatorMeaning();
      },
      py::arg("name"), py::arg("overload"));
}

}  // namespace trireme::python
