// Checkpoints without an engine.
#include "trireme/checkpoint/checkpoint.h"
#include "python/bindings.h"
#include "trireme/checkpoint/consolidate.h"
#include "trireme/checkpoint/source.h"

namespace trireme::python {
namespace {

std::vector<std::string> consolidate_to(const std::string& path, const std::string& folder, const std::string& tag,
                                        const std::string& file_name, const std::string& max_shard_size,
                                        bool exclude_frozen_parameters) {
  const ConsolidatedWeights weights = consolidate(open_checkpoint(path, tag), folder,
                                                  {.max_shard_bytes = parse_bytes(max_shard_size),
                                                   .exclude_frozen_parameters = exclude_frozen_parameters,
                                                   .file_name = file_name});
  std::vector<std::string> names;
  for (const auto& file : weights.files) names.push_back(file.string());
  return names;
}

}  // namespace

void bind_checkpoint(py::module_& module) {
  module.def(
      "fp32_state_dict",
      [](const std::string& path, const std::string& tag, bool exclude_frozen_parameters) {
        return fp32_state_dict(open_checkpoint(path, tag), exclude_frozen_parameters);
      },
      py::arg("path"), py::arg("tag"), py::arg("exclude_frozen_parameters"), WithoutGil());
  module.def("consolidate", &consolidate_to, py::arg("path"), py::arg("folder"), py::arg("tag"), py::arg("file_name"),
             py::arg("max_shard_size"), py::arg("exclude_frozen_parameters"), WithoutGil());
  module.def(
      "latest_tag", [](const std::string& directory) { return latest_tag(directory); }, py::arg("directory"));
}

}  // namespace trireme::python
