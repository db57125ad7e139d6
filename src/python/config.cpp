#include "trireme/config/config.h"

#include <nlohmann/json.hpp>

#include "python/bindings.h"
#include "trireme/base/json.h"

namespace trireme::python {

void bind_config(py::module_& module) {
  module.def(
      "plain_json", [](const std::string& text, const std::string& origin) { return parse_hjson(text, origin).dump(); },
      py::arg("text"), py::arg("origin"), "JSON text of Hjson. Raises ConfigError, which opens with `origin`.");
  module.def(
      "resolve_config",
      [](const std::string& text, int world_size, const std::string& origin) {
        return to_text(parse_config(text, world_size, {}, origin));
      },
      py::arg("text"), py::arg("world_size"), py::arg("origin"),
      "Every option of a configuration (JSON text), spelled out, as JSON text. Raises as read_config.");
}

}  // namespace trireme::python
