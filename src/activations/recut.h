// The all-to-all of blocks that cuts a tensor otherwise.
#pragma once

#include <ATen/core/Tensor.h>

#include "trireme/activations/placement.h"
#include "trireme/comm/group.h"

namespace trireme {

/// This rank's part by `to` of a tensor of which it has `part` by `from`. An element that several ranks have by `from`
/// is sent by the first of them. `adds`: the transposed way: `part` is by `to`, and what several ranks have adds up.
at::Tensor recut_blocks(const at::Tensor& part, const Cut& from, const Cut& to, bool adds, Group& group);

}  // namespace trireme
