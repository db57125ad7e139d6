// Arguments of a call that handlers of operators on sharded activations read and replace.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trireme/intercept.h"

namespace trireme {

/// Argument `index` of `call`, to be replaced.
inline c10::IValue& argument(OperatorCall& call, size_t index) {
  return call.stack[call.stack.size() - call.traits.arguments + index];
}

/// The value of the argument `name` of the schema; None where there is none.
inline c10::IValue value_of(const OperatorCall& call, const char* name) {
  const auto index = call.op.schema().argumentIndexWithName(name);
  return index ? call.arguments()[static_cast<size_t>(*index)] : c10::IValue();
}

/// The dims that the operator names, of a tensor of `dims` dims; empty where it names none.
std::vector<int64_t> named_dims(const OperatorCall& call, int64_t dims);

/// Whether `call` writes argument 0.
inline bool writes_first(const OperatorCall& call) { return (call.traits.written & 1) != 0; }

/// Results in place of the arguments.
inline void give(OperatorCall& call, std::vector<c10::IValue> results) {
  torch::jit::drop(call.stack, call.traits.arguments);
  for (c10::IValue& result : results) call.stack.push_back(std::move(result));
}

}  // namespace trireme
