#include "trireme/comm/group.h"

#include <ATen/ops/zeros.h>

#include "trireme/base/error.h"

namespace trireme {

at::Tensor Group::registered_zeros(int64_t bytes, c10::Device device) {
  return at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

std::vector<Pending<void>> Group::all_gather_coalesced(const std::vector<at::Tensor>& outputs,
                                                       const std::vector<at::Tensor>& inputs) {
  if (outputs.size() != inputs.size())
    throw ShapeError(
        str("all_gather_coalesced: expected an input for each output, got ", inputs.size(), " and ", outputs.size()));
  return gather_each(outputs, inputs);
}

std::vector<Pending<void>> Group::gather_each(const std::vector<at::Tensor>& outputs,
                                              const std::vector<at::Tensor>& inputs) {
  std::vector<Pending<void>> pending;
  for (size_t i = 0; i < outputs.size(); ++i) pending.push_back(all_gather(outputs[i], inputs[i]));
  return pending;
}

}  // namespace trireme
