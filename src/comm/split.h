// The arguments of Group::split(), checked.
#pragma once

#include <string>
#include <vector>

#include "comm/call.h"

namespace trireme::comm {

struct Split {
  Call call;                      ///< ranks that name other parts have diverged
  std::vector<int> members = {};  ///< ranks of this rank's part; empty: it is in none
  GroupInfo info = {};            ///< of the group that this rank gets
  bool takes_part() const { return !members.empty(); }
};

/// Throws    ShapeError: a part without ranks, a rank that is not in the group or stands twice, a part that does not
///           ascend; each is named.
Split checked_split(const GroupInfo& group, const std::vector<std::vector<int>>& parts, const std::string& name);

}  // namespace trireme::comm
