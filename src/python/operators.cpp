// The meaning of libtorch's operators, from the table.
#include "python/bindings.h"
#include "trireme/operators/row.h"

namespace trireme::python {
void bind_operators(py::module_& module) {
  py::class_<OperatorMeaning>(module, "OperatorMeaning")
      .def_readonly("is_each", &OperatorMeaning::is_each)
      .def_readonly("is_alias", &OperatorMeaning::is_alias)
      .def_readonly("reads_first", &OperatorMeaning::reads_first)
      .def_property_readonly("reduction", [](const OperatorMeaning& meaning) {
        constexpr const char* kNames[] = {"each", "whole", "places",  "sum", "mean",
                                          "max",  "min",   "product", "any", "all"};  // of FactorKind
        return meaning.reduction ? kNames[static_cast<size_t>(*meaning.reduction)] : nullptr;
      });
  module.def(
      "operator_meaning",
      [](const std::string& name, const std::string& overload) {
        const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
        return op ? meaning_of(*op) : OperatorMeaning();
      },
      py::arg("name"), py::arg("overload"));
}

}  // namespace trireme::python
