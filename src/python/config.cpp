#include "trireme/config/source.h"

#include <nlohmann/json.hpp>

#include "python/bindings.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/config/dialects/accelerate.h"

namespace trireme::python {

void bind_config(py::module_& module) {
  module.def(
      "plain_json",
      [](const std::string& text, const std::string& origin, bool has_lines) {
        return options_of(has_lines ? parse_source(text, origin) : source_from_json(parse_hjson(text, origin), origin))
            .dump();
      },
      py::arg("text"), py::arg("origin"), py::arg("has_lines") = true,
      "JSON text of a configuration in any dialect; YAML where `origin` is the path of such a file. Raises "
      "ConfigError, which opens with `origin` and, of a text that `has_lines` to its reader, the line.");
  module.def(
      "read_config_text", [](const std::string& path) { return py::bytes(read_config_text(path)); }, py::arg("path"),
      "The bytes of a file of people's, such as a configuration.\n\n"
      "Raises IoError, which names the file: not there, no regular file, or larger than such files are.");
  module.def(
      "is_accelerates", [](const std::string& text) { return is_accelerates(parse_plain_json(text)); }, py::arg("text"),
      "Whether JSON text has the keys of Accelerate, of its files or of its FullyShardedDataParallelPlugin.");
  py::class_<Config>(module, "Config", "trireme::Config, read from JSON text. Raises as read_config.")
      .def(py::init([](const std::string& text, int world_size, const std::string& origin, int pipe, bool is_file) {
             ConfigSource source = source_from_json(parse_hjson(text, origin), origin);
             if (is_file) name_as_in_file(source, origin);
             return config_from_source(source, world_size, {.pipe = pipe});
           }),
           py::arg("text"), py::arg("world_size"), py::arg("origin"), py::arg("pipe") = 1, py::arg("is_file") = false)
      .def_property_readonly("text", &to_text, "Every option, spelled out, as JSON text.");
}

}  // namespace trireme::python
