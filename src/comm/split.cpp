#include "comm/split.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdint>

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

/// Which part each rank stands in; -1: in none.
class Assignment {
 public:
  explicit Assignment(const GroupInfo& group) : group_(group), parts_(static_cast<size_t>(group.place.size), -1) {}

  void add(int part, const std::vector<int>& members) {
    if (members.empty()) refuse(str("part ", part, " has no ranks; leave it out"));
    for (size_t index = 0; index < members.size(); ++index) {
      const int rank = members[index];
      if (rank < 0 || rank >= group_.place.size)
        refuse(str("part ", part, " names rank ", rank, "; the group has ranks 0 to ", group_.place.size - 1));
      int& assigned = parts_[static_cast<size_t>(rank)];
      if (assigned >= 0)
        refuse(str("rank ", rank, " stands in part ", assigned,
                   assigned == part ? " twice" : str(" and in part ", part), "; name each rank once"));
      if (index > 0 && rank < members[index - 1])
        refuse(str("part ", part, " names rank ", members[index - 1], " before rank ", rank,
                   "; name its ranks in ascending order"));
      assigned = part;
    }
  }

 private:
  [[noreturn]] void refuse(const std::string& problem) const {
    throw ShapeError(str("split of group '", group_.name, "': ", problem));
  }

  const GroupInfo& group_;
  std::vector<int> parts_;
};

}  // namespace

Split checked_split(const GroupInfo& group, const std::vector<std::vector<int>>& parts, const std::string& name) {
  if (parts.empty()) throw ShapeError(str("split of group '", group.name, "': expected at least one part, got none"));
  Split split;
  Assignment assignment(group);
  std::vector<int> numbers;  // of each part its size and its ranks, for a fingerprint that all ranks compare
  for (size_t part = 0; part < parts.size(); ++part) {
    const std::vector<int>& members = parts[part];
    assignment.add(static_cast<int>(part), members);
    numbers.push_back(static_cast<int>(members.size()));
    numbers.insert(numbers.end(), members.begin(), members.end());
    if (std::find(members.begin(), members.end(), group.place.rank) != members.end()) split.members = members;
  }
  split.call.kind = CallKind::kSplit;
  split.call.numel = static_cast<int64_t>(XXH3_64bits(numbers.data(), numbers.size() * sizeof(int)) >> 1);
  if (split.takes_part()) split.info = group.part(split.members, name);
  return split;
}

}  // namespace trireme::comm
