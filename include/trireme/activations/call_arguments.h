// Arguments of a call that handlers of operators on sharded activations read and replace.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trireme/intercept.h"

namespace trireme {

/// A reference to argument `index` of `call`, so that it can be replaced.
inline c10::IValue& argument(OperatorCall& call, size_t index) {
  return call.stack[call.stack.size() - call.traits.arguments + index];
}

/// The value of the argument called `name` in the schema; None if the schema has no such argument.
inline c10::IValue value_of(const OperatorCall& call, const char* name) {
  const auto index = call.op.schema().argumentIndexWithName(name);
  return index ? call.arguments()[static_cast<size_t>(*index)] : c10::IValue();
}

/// Tensors among arguments, those of lists one by one; undefined where a list has none.
std::vector<at::Tensor> tensors_among(c10::ArrayRef<c10::IValue> arguments);
/// The arguments with these tensors in their places.
std::vector<c10::IValue> with_tensors(std::vector<c10::IValue> arguments, const std::vector<at::Tensor>& tensors);

/// The dims that the operator names, of a tensor of `dims` dims; empty where it names none.
std::vector<int64_t> named_dims(const OperatorCall& call, int64_t dims);

/// Whole numbers, and what is true: few bytes, and without a gradient.
inline bool is_of_numbers(const at::Tensor& tensor) {
  return at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
}

/// Whether `call` writes argument 0.
inline bool writes_first(const OperatorCall& call) { return (call.traits.written & 1) != 0; }

/// Replaces the arguments on the call's stack by `results`.
inline void give(OperatorCall& call, std::vector<c10::IValue> results) {
  torch::jit::drop(call.stack, call.traits.arguments);
  for (c10::IValue& result : results) call.stack.push_back(std::move(result));
}

}  // namespace trireme
