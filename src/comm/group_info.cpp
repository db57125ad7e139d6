#include "comm/group_info.h"

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::comm {

std::string GroupInfo::title(int rank, const std::string& note) const {
  std::string notes = world_rank(rank) == rank ? "" : str("world rank ", world_rank(rank));
  if (!note.empty()) notes += (notes.empty() ? "" : ", ") + note;
  return notes.empty() ? str("rank ", rank) : str("rank ", rank, " (", notes, ")");
}

GroupInfo GroupInfo::part(const std::vector<int>& members, const std::string& part_name) const {
  const auto self = std::find(members.begin(), members.end(), place.rank);
  GroupInfo info{.name = part_name,
                 .place = {static_cast<int>(self - members.begin()), static_cast<int>(members.size())},
                 .timeout = timeout,
                 .warn_after = warn_after};
  bool is_numbered_alike = true;
  for (const int member : members) {
    is_numbered_alike = is_numbered_alike && world_rank(member) == static_cast<int>(info.world_ranks.size());
    info.world_ranks.push_back(world_rank(member));
  }
  if (is_numbered_alike) info.world_ranks.clear();
  return info;
}

}  // namespace trireme::comm
