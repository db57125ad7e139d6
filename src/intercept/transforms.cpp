#include "trireme/intercept/transforms.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/TensorWrapper.h>

namespace trireme {

namespace {

/// The tensor that one transform has wrapped; null: it is none of theirs.
const at::Tensor* wrapped(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  const c10::DispatchKeySet keys = tensor.unsafeGetTensorImpl()->key_set();
  if (keys.has(c10::DispatchKey::FuncTorchBatched)) return &at::functorch::maybeGetBatchedImpl(tensor)->value();
  if (keys.has(c10::DispatchKey::FuncTorchGradWrapper)) return &at::functorch::maybeGetTensorWrapper(tensor)->value();
  return nullptr;
}

}  // namespace

const at::Tensor& under_transforms(const at::Tensor& tensor) {
  const at::Tensor* inner = &tensor;
  while (const at::Tensor* next = wrapped(*inner)) inner = next;
  return *inner;
}

bool has_tangent(const at::Tensor& tensor) {
  for (const at::Tensor* one = &tensor; one != nullptr && one->defined(); one = wrapped(*one))
    if (one->_fw_grad(/*level=*/0).defined()) return true;
  return false;
}

}  // namespace trireme
