#include "trireme/intercept/transforms.h"

#include <ATen/functorch/BatchedTensorImpl.h>
#include <ATen/functorch/TensorWrapper.h>

namespace trireme {

const at::Tensor& under_transforms(const at::Tensor& tensor) {
  const at::Tensor* inner = &tensor;
  while (inner->defined()) {
    const c10::DispatchKeySet keys = inner->unsafeGetTensorImpl()->key_set();
    if (keys.has(c10::DispatchKey::FuncTorchBatched))
      inner = &at::functorch::maybeGetBatchedImpl(*inner)->value();
    else if (keys.has(c10::DispatchKey::FuncTorchGradWrapper))
      inner = &at::functorch::maybeGetTensorWrapper(*inner)->value();
    else
      break;
  }
  return *inner;
}

}  // namespace trireme
