// Tensors and operators under torch.func's transforms (vmap, grad) and Python's dispatch modes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>

namespace trireme {

/// The tensor with a storage that `tensor` stands for in a transform; `tensor` itself if it is none of theirs.
const at::Tensor& under_transforms(const at::Tensor& tensor);
/// Whether `tensor`, or what it stands for, carries a tangent of forward-mode differentiation (jvp()).
bool has_tangent(const at::Tensor& tensor);

/// While it lives, operators run outside of the transforms: for the operators by which the owner of a storage makes it
/// whole, which are not part of the transformed program.
class [[nodiscard]] OutsideOfTransforms {
 public:
  OutsideOfTransforms() {
    constexpr c10::DispatchKeySet kTransforms({c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                                               c10::DispatchKey::FuncTorchDynamicLayerBackMode,
                                               c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot});
    if (c10::impl::tls_local_dispatch_key_set().included_.has_any(kTransforms)) guard_.emplace(kTransforms);
  }

 private:
  std::optional<c10::impl::ExcludeDispatchKeyGuard> guard_;
};

}  // namespace trireme
