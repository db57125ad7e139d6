#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "python/engine.h"
#include "trireme/observe/monitors.h"

namespace trireme::python {
namespace {

using Event = std::tuple<std::string, double, int64_t>;

void write_events(Monitors& self, const std::vector<Event>& events) {
  std::vector<MonitorEvent> list;
  for (const auto& [name, value, x] : events) list.push_back({name, value, x});
  self.write(list);
}

std::vector<Event> take_step_events(EngineBase& self, std::optional<double> lr) {
  std::vector<Event> events;
  for (MonitorEvent& event : self.events().take(lr)) events.emplace_back(std::move(event.name), event.value, event.x);
  return events;
}

}  // namespace

void bind_step_events(EngineBaseClass& engine) {
  engine
      .def("take_step_events", &take_step_events, py::arg("lr"), WithoutGil(),
           "(name, value, samples) of the last step, for monitors; empty where none is on, and but on rank 0.")
      .def(
          "end_record", [](EngineBase& self, const std::string& reason) { self.events().end(reason); },
          py::arg("reason"), WithoutGil());
}

void bind_monitors(py::module_& module) {
  py::class_<Monitors>(module, "FileMonitor", "The files of a section of the configuration. Raises IoError.")
      .def(
          py::init([](const std::string& key, const std::string& output_path, const std::string& job_name) {
            return new Monitors(open_monitor(key, {.enabled = true, .output_path = output_path, .job_name = job_name}));
          }),
          py::arg("key"), py::arg("output_path"), py::arg("job_name"), WithoutGil())
      .def("write", &write_events, py::arg("events"), WithoutGil(), "Events (name, value, x).");
}

}  // namespace trireme::python
