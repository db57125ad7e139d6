#include "trireme/config/config.h"

#include <nlohmann/json.hpp>

#include "python/bindings.h"
#include "trireme/base/json.h"

namespace trireme::python {

void bind_config(py::module_& module) {
  module.def(
      "plain_json", [](const std::string& text, const std::string& origin) { return parse_hjson(text, origin).dump(); },
      py::arg("text"), py::arg("origin"), "JSON text of Hjson. Raises ConfigError, which opens with `origin`.");
  py::class_<Config>(module, "Config", "trireme::Config, read from JSON text. Raises as read_config.")
      .def(py::init([](const std::string& text, int world_size, const std::string& origin) {
             return parse_config(text, world_size, {}, origin);
           }),
           py::arg("text"), py::arg("world_size"), py::arg("origin"))
      .def_property_readonly("text", &to_text, "Every option, spelled out, as JSON text.");
}

}  // namespace trireme::python
