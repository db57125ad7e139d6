// The sum of squares over all gradients of all ranks.
#pragma once

#include <vector>

#include "pager/exact_sum.h"
#include "trireme/comm/group.h"
#include "trireme/pager/pager.h"

namespace trireme {

/// The ranks' parts, added without rounding. Collective.
double sum_over_ranks(Group& group, const ExactSum& mine);

/// [] fp64 on the parameters' device, of which the host reads nothing. Every rank adds up the shares of its own shards,
/// at stage 0 too, so that the bits do not depend on the stage. `norms`, by owned slice, of those that have left the
/// device; undefined for the others. Collective.
at::Tensor sum_of_squares_on_device(Group& group, const Layout& layout, const std::vector<OwnedSlice>& owned,
                                    std::vector<at::Tensor> norms);

}  // namespace trireme
