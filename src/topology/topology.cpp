#include "trireme/topology.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/suggest.h"

namespace trireme {

Topology::Topology(std::vector<Axis> axes) : axes_(std::move(axes)), strides_(axes_.size()) {
  if (axes_.empty()) throw ConfigError("a topology needs at least one axis, such as {\"data\", 4}");
  // From the last axis, which varies fastest.
  for (size_t i = axes_.size(); i-- > 0;) {
    const Axis& axis = axes_[i];
    if (axis.name.empty()) throw ConfigError(str("axis ", i, " of the topology has no name; give it one"));
    if (index_of(axis.name) != static_cast<int>(i))
      throw ConfigError(str("the axis \"", axis.name, "\" stands twice in the topology; rename or remove one"));
    if (axis.size < 1)
      throw ConfigError(str("the axis \"", axis.name, "\" has size ", axis.size, "; expected 1 or more"));
    if (axis.size > std::numeric_limits<int>::max() / size_)
      throw ConfigError(
          str("the topology has more ranks than fit an int at the axis \"", axis.name, "\" of size ", axis.size));
    strides_[i] = size_;
    size_ *= axis.size;
  }
}

bool Topology::has(std::string_view axis) const noexcept { return index_of(axis) >= 0; }

int Topology::size_of(std::string_view axis) const noexcept {
  const int index = index_of(axis);
  return index < 0 ? 1 : axes_[index].size;
}

int Topology::rank_of(const std::vector<Place>& coordinate) const {
  std::vector<int> positions(axes_.size(), -1);
  for (const auto& [name, position] : coordinate) {
    const int index = checked_index_of(name);
    if (position < 0 || position >= axes_[index].size)
      throw ConfigError(str("position ", position, " on axis \"", name, "\"; expected 0 to ", axes_[index].size - 1));
    if (positions[index] >= 0) throw ConfigError(str("the axis \"", name, "\" is given twice; name each axis once"));
    positions[index] = position;
  }
  int rank = 0;
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (positions[i] < 0)
      throw ConfigError(str("the coordinate lacks the axis \"", axes_[i].name, "\"; give its position"));
    rank += positions[i] * strides_[i];
  }
  return rank;
}

std::vector<int> Topology::coordinate_of(int rank) const {
  check_rank(rank);
  std::vector<int> positions;
  for (size_t i = 0; i < axes_.size(); ++i) positions.push_back(rank / strides_[i] % axes_[i].size);
  return positions;
}

int Topology::position_of(int rank, std::string_view axis) const {
  check_rank(rank);
  const int index = index_of(axis);
  return index < 0 ? 0 : rank / strides_[index] % axes_[index].size;
}

std::vector<std::vector<int>> Topology::groups_along(std::string_view axis) const {
  std::vector<std::vector<int>> groups;
  if (!has(axis)) return groups;
  for (int rank = 0; rank < size_; ++rank)
    if (position_of(rank, axis) == 0) groups.push_back(group_of(rank, axis));
  return groups;
}

std::vector<std::vector<int>> Topology::groups_along_all(const std::vector<std::string>& axes) const {
  std::vector<bool> varies(axes_.size());
  for (const std::string& axis : axes) varies[static_cast<size_t>(checked_index_of(axis))] = true;
  std::map<int, std::vector<int>> groups;  // by their first rank
  for (int rank = 0; rank < size_; ++rank) {
    int first = rank;
    for (size_t i = 0; i < axes_.size(); ++i)
      if (varies[i]) first -= rank / strides_[i] % axes_[i].size * strides_[i];
    groups[first].push_back(rank);
  }
  std::vector<std::vector<int>> ascending;
  for (auto& [first, ranks] : groups) ascending.push_back(std::move(ranks));
  return ascending;
}

std::vector<int> Topology::group_of(int rank, std::string_view axis) const {
  check_rank(rank);
  const int index = index_of(axis);
  if (index < 0) return {rank};
  const int first = rank - position_of(rank, axis) * strides_[index];
  std::vector<int> group;
  for (int position = 0; position < axes_[index].size; ++position) group.push_back(first + position * strides_[index]);
  return group;
}

std::vector<int> Topology::ranks_at(const std::vector<Place>& places) const {
  for (const auto& [name, position] : places) checked_index_of(name);
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    const auto stands_there = [&](const Place& place) { return position_of(rank, place.first) == place.second; };
    if (std::all_of(places.begin(), places.end(), stands_there)) ranks.push_back(rank);
  }
  return ranks;
}

std::string Topology::label_of(int rank, const std::vector<std::string>& omitted) const {
  std::string label;
  const std::vector<int> positions = coordinate_of(rank);
  for (size_t i = 0; i < axes_.size(); ++i) {
    if (std::find(omitted.begin(), omitted.end(), axes_[i].name) != omitted.end()) continue;
    label += str(label.empty() ? "" : "-", axes_[i].name, positions[i] < 10 ? "_0" : "_", positions[i]);
  }
  return label;
}

int Topology::index_of(std::string_view axis) const noexcept {
  const auto found = std::find_if(axes_.begin(), axes_.end(), [&](const Axis& other) { return other.name == axis; });
  return found == axes_.end() ? -1 : static_cast<int>(found - axes_.begin());
}

int Topology::checked_index_of(std::string_view axis) const {
  const int index = index_of(axis);
  if (index >= 0) return index;
  std::vector<std::string> names;
  for (const Axis& other : axes_) names.push_back(other.name);
  throw ConfigError(str("the topology has no axis \"", axis, "\".", did_you_mean(axis, names)));
}

void Topology::check_rank(int rank) const {
  if (rank < 0 || rank >= size_)
    throw ShapeError(str("rank ", rank, " is not in the topology; expected 0 to ", size_ - 1));
}

}  // namespace trireme
