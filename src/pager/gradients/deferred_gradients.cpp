#include "pager/gradients/deferred_gradients.h"

#include <ATen/TensorOperators.h>

#include "pager/layout/gradient_dtypes.h"

namespace trireme {

void DeferredGradients::add(int parameter, const at::Tensor& gradient) {
  at::Tensor& sum = sums_[parameter];
  // A copy even where the dtype is the same: autograd may still hold the gradient, or a peer's turn to read its memory
  // come.
  if (!sum.defined())
    sum = gradient.to(accumulation_dtype(context_.layout.units[context_.parameters[parameter].unit], context_.policy),
                      /*non_blocking=*/false,
                      /*copy=*/true);
  else
    sum.add_(gradient);
}

void DeferredGradients::add_to(PagerMemory& memory) const {
  for (const at::Tensor& sum : sums_)
    if (sum.defined()) memory.deferred_bytes += static_cast<int64_t>(sum.nbytes());
}

}  // namespace trireme
