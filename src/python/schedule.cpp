// Learning-rate schedules as pure functions.
#include "trireme/optim/lr_schedule.h"

#include "python/bindings.h"
#include "python/json.h"
#include "trireme/config/config.h"

namespace trireme::python {

void bind_schedule(py::module_& module) {
  py::class_<LrSchedule>(module, "Schedule", "trireme::LrSchedule of a configuration's `scheduler` section, a dict.")
      .def(py::init([](const Json& section, std::vector<double> group_lrs) {
             const Json options{{"train_micro_batch_size_per_gpu", 1}, {"scheduler", section}};
             const Config config = config_from_json(options, 1, {}, "<string>");
             return LrSchedule(config.scheduler.value_or(LrScheduleOptions{}), std::move(group_lrs));
           }),
           py::arg("section"), py::arg("group_lrs"))
      .def("lr", &LrSchedule::lr, py::arg("applied_steps"), py::arg("group") = 0)
      .def("momentum", &LrSchedule::momentum, py::arg("applied_steps"), py::arg("group") = 0)
      .def_property_readonly_static("cycle_beta2", [](const py::object&) { return LrSchedule::kCycleBeta2; });
}

}  // namespace trireme::python
