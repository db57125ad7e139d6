#include "trireme/activations/call_key.h"

#include <bit>

#include "trireme/base/mix64.h"

namespace trireme {

CallKey::CallKey(const OperatorCall& call) {
  add(&call.op.schema());
  for (const c10::IValue& argument : call.arguments()) add_value(argument);
}

void CallKey::add_tensor(const at::Tensor& tensor) {
  add(tensor.defined() ? tensor.dim() : -1);
  if (!tensor.defined()) return;
  for (const int64_t size : tensor.sizes()) add(size);
  add(static_cast<int64_t>(tensor.scalar_type()));
}

void CallKey::add_value(const c10::IValue& value) {
  enum Kind : int64_t { kNone, kTensor, kInteger, kNumber, kFlag, kIntegers, kTensors, kText, kPlace };
  if (value.isNone()) {
    add(kNone);
  } else if (value.isTensor()) {
    add(kTensor);
    add_tensor(value.toTensor());
  } else if (value.isInt()) {
    add(kInteger);
    add(value.toInt());
  } else if (value.isBool()) {
    add(kFlag);
    add(value.toBool() ? 1 : 0);
  } else if (value.isDouble()) {
    add(kNumber);
    add(std::bit_cast<int64_t>(value.toDouble()));
  } else if (value.isIntList()) {
    const c10::List<int64_t> list = value.toIntList();
    add(kIntegers);
    add(static_cast<int64_t>(list.size()));
    for (const int64_t one : list) add(one);
  } else if (value.isTensorList()) {
    const c10::List<at::Tensor> list = value.toTensorList();
    add(kTensors);
    add(static_cast<int64_t>(list.size()));
    for (const at::Tensor& one : list) add_tensor(one);
  } else if (value.isOptionalTensorList()) {
    const c10::List<std::optional<at::Tensor>> list = value.toOptionalTensorList();
    add(kTensors);
    add(static_cast<int64_t>(list.size()));
    for (const std::optional<at::Tensor>& one : list) add_tensor(one.value_or(at::Tensor()));
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    add(kText);
    add(static_cast<int64_t>(text.size()));
    for (const char letter : text) add(letter);
  } else if (value.isDevice()) {
    add(kPlace);
    add(static_cast<int64_t>(value.toDevice().type()));
    add(value.toDevice().index());
  } else {
    is_complete_ = false;
  }
}

size_t CallKey::Hash::operator()(const CallKey& key) const {
  uint64_t hash = key.words_.size();
  for (const int64_t word : key.words_) hash = mix64(hash ^ static_cast<uint64_t>(word));
  return hash;
}

}  // namespace trireme
