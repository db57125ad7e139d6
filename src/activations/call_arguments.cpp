#include "trireme/activations/call_arguments.h"

namespace trireme {

std::vector<int64_t> named_dims(const OperatorCall& call, int64_t dims) {
  std::vector<int64_t> result;
  for (const char* name : {"dim", "dims", "dim0", "dim1", "dimension", "axis0", "axis1"}) {
    const c10::IValue value = value_of(call, name);
    if (value.isInt()) result.push_back(value.toInt());
    if (value.isIntList())
      for (const int64_t dim : value.toIntVector()) result.push_back(dim);
  }
  for (int64_t& dim : result)
    if (dim < 0) dim += dims;
  return result;
}

std::vector<at::Tensor> tensors_among(c10::ArrayRef<c10::IValue> arguments) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& argument : arguments) {
    if (argument.isTensor()) tensors.push_back(argument.toTensor());
    if (argument.isTensorList())
      for (const at::Tensor& one : argument.toTensorVector()) tensors.push_back(one);
    if (argument.isOptionalTensorList())
      for (const std::optional<at::Tensor>& one : argument.toOptionalTensorVector())
        tensors.push_back(one.value_or(at::Tensor()));
  }
  return tensors;
}

std::vector<c10::IValue> with_tensors(std::vector<c10::IValue> arguments, const std::vector<at::Tensor>& tensors) {
  size_t next = 0;
  for (c10::IValue& argument : arguments) {
    if (argument.isTensor()) {
      argument = tensors[next++];
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (size_t i = argument.toTensorVector().size(); i > 0; --i) list.push_back(tensors[next++]);
      argument = std::move(list);
    } else if (argument.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& one : argument.toOptionalTensorVector()) {
        const at::Tensor& other = tensors[next++];
        list.push_back(one ? std::optional(other) : std::nullopt);
      }
      argument = std::move(list);
    }
  }
  return arguments;
}

}  // namespace trireme
