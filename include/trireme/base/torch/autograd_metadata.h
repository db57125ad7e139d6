// One autograd metadata (history, gradient, hooks) for two tensors.
#pragma once

#include <c10/core/TensorImpl.h>

namespace trireme {

/// From here on `other`, which has none, has the metadata of `owner`. Before either of them releases them, other must
/// forget them; nothing may be set in the place of other's meanwhile.
void share_autograd_metadata(const c10::TensorImpl& owner, c10::TensorImpl& other);
/// Takes shared metadata away from `other`, whose owner keeps them.
void forget_autograd_metadata(c10::TensorImpl& other) noexcept;
/// Gives the metadata of `from` to `to`, which has none.
void move_autograd_metadata(c10::TensorImpl& from, c10::TensorImpl& to);

}  // namespace trireme
