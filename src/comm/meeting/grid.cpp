#include "trireme/comm/grid.h"

#include <utility>

#include "comm/fabric/fabric_backend.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

/// A group of this rank alone, made without its peers.
std::unique_ptr<Group> alone_of(Group& world, const std::string& name) {
  const auto memory = comm::heap_memory();
  auto backend = std::make_unique<comm::FabricBackend>(memory, memory->create(comm::FabricLayout(1).bytes()),
                                                       world.backend().info().part({world.rank()}, name));
  return std::make_unique<Group>(std::move(backend));
}

}  // namespace

Grid::Grid(Group& world, Topology topology) : world_(world), topology_(std::move(topology)) {
  if (topology_.size() != world_.size())
    throw ConfigError(str("the topology has ", topology_.size(), " ranks and group '", world_.name(), "' has ",
                          world_.size(), "; the sizes of the axes must multiply to the number of ranks"));
  std::vector<std::string> axes;
  for (const Axis& axis : topology_.axes())
    if (axis.size > 1) axes.push_back(axis.name);
  if (axes.empty()) return;
  const Axes none;
  groups_[none] = alone_of(world_, name_of(none));
  const size_t all = (size_t{1} << axes.size()) - 1;
  for (size_t combination = 1; combination < all; ++combination) {
    Axes chosen;
    for (size_t i = 0; i < axes.size(); ++i)
      if ((combination >> i & 1) != 0) chosen.insert(axes[i]);
    groups_[chosen] = world_.split(topology_.groups_along_all({chosen.begin(), chosen.end()}), name_of(chosen));
  }
}

Group& Grid::along(const std::vector<std::string>& axes) const {
  Axes chosen;
  for (const std::string& axis : axes) {
    topology_.check_has(axis);
    if (topology_.size_of(axis) > 1) chosen.insert(axis);
  }
  const auto found = groups_.find(chosen);
  return found == groups_.end() ? world_ : *found->second;  // no group of its own: all axes
}

std::string Grid::where() const {
  std::string text;
  for (const Axis& axis : topology_.axes())
    if (axis.size > 1) text += str(text.empty() ? "" : ", ", axis.name, " ", position_on(axis.name));
  return text;
}

std::string Grid::name_of(const Axes& axes) const {
  std::string place, direction;
  for (const Axis& axis : topology_.axes()) {
    if (axis.size == 1) continue;
    const bool is_along = axes.contains(axis.name);
    std::string& text = is_along ? direction : place;
    if (!text.empty()) text += "-";
    text += is_along ? axis.name : str(axis.name, position_on(axis.name));
  }
  return direction.empty() ? place : str(place, "/", direction);
}

}  // namespace trireme
