#include <ATen/ops/empty.h>

#include <string_view>

#include "trireme/checkpoint/consolidate.h"

namespace trireme {

std::map<std::string, at::Tensor> fp32_state_dict(const CheckpointSource& source) {
  constexpr std::string_view kModel = "model.", kMaster = "master.";
  std::map<std::string, size_t> chosen;
  for (const std::string_view kind : {kModel, kMaster})
    for (size_t i = 0; i < source.manifest.tensors.size(); ++i)
      if (const std::string& name = source.manifest.tensors[i].name; name.starts_with(kind))
        chosen[name.substr(kind.size())] = i;
  TensorReader reader(source);
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, index] : chosen) {
    const SavedTensor& saved = source.manifest.tensors[index];
    at::Tensor tensor = at::empty(saved.shape, saved.dtype);
    reader.read(index, 0, tensor.numel(), static_cast<std::byte*>(tensor.data_ptr()));
    result[name] = at::isFloatingType(saved.dtype) ? tensor.to(at::kFloat) : tensor;
  }
  return result;
}

}  // namespace trireme
