// The work of a model's operators, by its modules' calls.
#include "python/bindings.h"
#include "trireme/observe/work_count.h"

namespace trireme::python {
void bind_work(py::module_& module) {
  py::class_<WorkCount>(module, "WorkCount")
      .def(py::init<>())
      .def("reset", &WorkCount::reset)
      .def("start", &WorkCount::start)
      .def("stop", &WorkCount::stop)
      .def("enter", &WorkCount::enter, py::arg("module"))
      .def("leave", &WorkCount::leave, py::arg("module"))
      .def_property_readonly("is_running", &WorkCount::is_running)
      .def_property_readonly(
          "calls",
          [](const WorkCount& count) {
            py::list rows;
            for (const WorkCall& call : count.calls())
              rows.append(py::make_tuple(call.caller, call.module, call.calls, call.seconds, call.sums.forward,
                                         call.sums.backward, call.sums.recomputed));
            return rows;
          })
      .def_property_readonly("uncounted", [](const WorkCount& count) {
        py::dict names;
        for (const auto& [name, calls] : count.uncounted()) names[py::str(name)] = calls;
        return names;
      });
}

}  // namespace trireme::python
