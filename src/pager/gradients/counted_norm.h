// The norm of a unit's gradients without those that another rank counts. On the device: the host reads nothing.
#pragma once

#include <ATen/core/Tensor.h>

#include "pager/weights/store.h"

namespace trireme {

/// Whether this rank counts all parameters of `unit`.
bool is_all_counted(const StoreContext& context, int unit);

/// [] fp64, of the counted elements of `gradients`: those of the piece of `unit` that this rank updates.
at::Tensor counted_norm(const StoreContext& context, int unit, const at::Tensor& gradients);

}  // namespace trireme
