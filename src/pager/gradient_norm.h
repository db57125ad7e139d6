// The sum of squares over all gradients of all ranks.
#pragma once

#include <vector>

#include "pager/gradient_store.h"
#include "trireme/pager/pager.h"

namespace trireme {

/// [] fp64 over the touched parameters, after GradientStore::finish(). On a device that is where it stays, and the host
/// reads nothing. Collective.
at::Tensor sum_of_squares(const StoreContext& context, const std::vector<OwnedSlice>& owned,
                          const GradientStore& gradients);

}  // namespace trireme
