// Which rank stands where.
#include "trireme/topology.h"

#include "python/bindings.h"
#include "trireme/base/error.h"
#include "trireme/parallel/plan.h"

namespace trireme::python {

void bind_topology(py::module_& module) {
  py::class_<Topology>(module, "Topology", "trireme::Topology: ranks on named axes, the last of which varies fastest.")
      .def(py::init([](const std::vector<Place>& axes) {
             std::vector<Axis> list;
             for (const auto& [name, size] : axes) list.push_back({name, size});
             return Topology(std::move(list));
           }),
           py::arg("axes"))
      .def_property_readonly("size", &Topology::size)
      .def(
          "check_axis", [](const Topology& self, const std::string& axis) { self.check_has(axis); }, py::arg("axis"))
      .def("size_of", &Topology::size_of, py::arg("axis"))
      .def("rank_of", &Topology::rank_of, py::arg("coordinate"))
      .def("coordinate_of", &Topology::coordinate_of, py::arg("rank"))
      .def("position_of", &Topology::position_of, py::arg("rank"), py::arg("axis"))
      .def("groups_along", &Topology::groups_along, py::arg("axis"))
      .def("group_of", &Topology::group_of, py::arg("rank"), py::arg("axis"))
      .def(
          "ranks_at",
          [](const Topology& self, const std::vector<Place>& places) {
            for (const auto& [axis, position] : places) {
              self.check_has(axis);
              if (position < 0 || position >= self.size_of(axis))
                throw ConfigError(
                    str("position ", position, " on axis \"", axis, "\"; expected 0 to ", self.size_of(axis) - 1));
            }
            return self.ranks_at(places);
          },
          py::arg("places"));
  module.def(
      "place",
      [](const std::string& strategy, int data, int pipe, int tensor) {
        return place(strategy, {.data = data, .pipe = pipe, .tensor = tensor});
      },
      py::arg("strategy"), py::arg("data"), py::arg("pipe"), py::arg("tensor"));
}

}  // namespace trireme::python
