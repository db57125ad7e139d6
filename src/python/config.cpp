#include "trireme/config/source.h"

#include "python/bindings.h"
#include "python/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/config/dialects/accelerate.h"

namespace trireme::python {

void bind_config(py::module_& module) {
  module.def(
      "options_of_text",
      [](const std::string& text, const std::string& origin) { return options_of(parse_source(text, origin)); },
      py::arg("text"), py::arg("origin"),
      "The options of a configuration's text in any dialect; YAML where `origin` is the path of such a file. Raises "
      "ConfigError, which opens with `origin` and the line.");
  module.def(
      "options_of", [](const Json& options) { return options_of(source_from_json(options, "config")); },
      py::arg("options"), "The same of a dict in any dialect, without lines.");
  module.def(
      "read_config_text", [](const std::string& path) { return py::bytes(read_config_text(path)); }, py::arg("path"),
      "The bytes of a file of people's, such as a configuration.\n\n"
      "Raises IoError, which names the file: not there, no regular file, or larger than such files are.");
  module.def("is_accelerates", &is_accelerates, py::arg("options"),
             "Whether a dict has the keys of Accelerate, of its files or of its FullyShardedDataParallelPlugin.");
  py::class_<Config>(module, "Config", "trireme::Config, read from a dict of options. Raises as read_config.")
      .def(py::init(
               [](const Json& options, int world_size, const std::string& origin, int pipe, bool is_file, int model) {
                 ConfigSource source = source_from_json(options, origin);
                 if (is_file) name_as_in_file(source, origin);
                 return config_from_source(source, world_size, {.pipe = pipe, .model = model});
               }),
           py::arg("options"), py::arg("world_size"), py::arg("origin"), py::arg("pipe") = 1,
           py::arg("is_file") = false, py::arg("model") = 1)
      .def_property_readonly(
          "options", [](const Config& self) { return to_json(self); }, "Every option, spelled out, as a dict.");
}

}  // namespace trireme::python
