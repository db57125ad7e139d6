// Which ranges of a flat shard can be updated by one call.
#pragma once

#include <cstdint>
#include <vector>

#include "trireme/pager/layout/layout.h"

namespace trireme {

/// Elements [begin, end) of a shard (counted from the shard's own start), all of one group, to be updated as step
/// number `step`.
struct Run {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t step = 0;
  int group = 0;
  int parameter = 0;  ///< the first one in it
};

/// Groups the touched parameters of [begin, begin + numel) into maximal runs of one group (group_of[parameter]) and
/// of equal step number, steps[parameter] + 1. Runs end on aligned parameter boundaries: the padding between is zero in
/// weights, gradients and states, and stays zero.
std::vector<Run> plan_runs(const UnitLayout& unit, int64_t begin, int64_t numel, const std::vector<bool>& touched,
                           const std::vector<int64_t>& steps, const std::vector<int>& group_of);

}  // namespace trireme
