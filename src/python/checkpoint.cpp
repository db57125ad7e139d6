// Checkpoints without an engine.
#include <ATen/ops/empty.h>

#include <map>

#include "python/bindings.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/consolidate.h"
#include "trireme/checkpoint/source.h"

namespace trireme::python {
namespace {

constexpr std::string_view kModel = "model.", kMaster = "master.";

/// Weights and buffers of a checkpoint by name; floating-point ones in fp32, from the masters where there are any.
std::map<std::string, at::Tensor> fp32_state_dict(const std::string& path, const std::string& tag) {
  const CheckpointSource source = open_checkpoint(path, tag);
  TensorReader reader(source);
  std::map<std::string, size_t> chosen;
  for (const std::string_view kind : {kModel, kMaster})
    for (size_t i = 0; i < source.manifest.tensors.size(); ++i)
      if (const std::string& name = source.manifest.tensors[i].name; name.starts_with(kind))
        chosen[name.substr(kind.size())] = i;
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, index] : chosen) {
    const SavedTensor& saved = source.manifest.tensors[index];
    at::Tensor tensor = at::empty(saved.shape, saved.dtype);
    reader.read(index, 0, tensor.numel(), static_cast<std::byte*>(tensor.data_ptr()));
    result[name] = at::isFloatingType(saved.dtype) ? tensor.to(at::kFloat) : tensor;
  }
  return result;
}

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
  module.def("fp32_state_dict", &fp32_state_dict, py::arg("path"), py::arg("tag"), WithoutGil());
  module.def("consolidate", &consolidate_to, py::arg("path"), py::arg("folder"), py::arg("tag"), py::arg("file_name"),
             py::arg("max_shard_size"), py::arg("exclude_frozen_parameters"), WithoutGil());
  module.def(
      "latest_tag", [](const std::string& directory) { return latest_tag(directory); }, py::arg("directory"));
}

}  // namespace trireme::python
