#include <ATen/ops/empty.h>

#include "checkpoint/export/weights_plan.h"
#include "trireme/checkpoint/consolidate.h"

namespace trireme {

std::map<std::string, at::Tensor> fp32_state_dict(const CheckpointSource& source, bool exclude_frozen_parameters) {
  const WeightsPlan plan =
      plan_weights(source, {.dtype = at::kFloat, .exclude_frozen_parameters = exclude_frozen_parameters});
  TensorReader reader(source);
  std::map<std::string, at::Tensor> result;
  for (const PlannedWeight& weight : plan.weights) {
    const SavedTensor& saved = source.manifest.tensors[weight.tensor];
    const at::Tensor tensor = at::empty(saved.shape, saved.dtype);
    reader.read(weight.tensor, 0, weight.numel, static_cast<std::byte*>(tensor.data_ptr()));
    result[weight.name] = tensor.to(weight.dtype);
  }
  for (const auto& [alias, name] : plan.aliases) result[alias] = result.at(name);
  return result;
}

}  // namespace trireme
