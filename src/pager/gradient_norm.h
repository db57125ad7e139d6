// The sum of squares over all gradients of all ranks.
#pragma once

#include <vector>

#include "pager/gradients/store.h"
#include "trireme/pager/pager.h"

namespace trireme {

/// [] fp64 over the touched parameters, after GradientStore::finish(). On a device that is where it stays, and the host
/// reads nothing. Each element counts once. Collective over `group`, which has the ranks of all meshes.
at::Tensor sum_of_squares(Group& group, const StoreContext& context, const std::vector<OwnedSlice>& owned,
                          const std::vector<std::unique_ptr<GradientStore>>& gradients);

}  // namespace trireme
