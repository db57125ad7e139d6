// The ranks of a job on several axes, and the groups of ranks along them.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/topology.h"

namespace trireme {

/// Where this rank stands in a Topology, and its group along every axis and every combination of axes.
///
/// The groups are made in the constructor, in the same order on every rank: making one is collective, so ranks that
/// asked for different ones at different times would deadlock. An axis of size 1 is ignored: a combination with it is
/// the one without it. The group of all axes is the world itself.
class Grid {
 public:
  /// Collective over `world`, which outlives the grid.
  ///
  /// Cost      for k axes longer than 1, 2^k - 2 collectives over `world`: one per axis and combination. None for k
  ///           = 1.
  /// Throws    ConfigError: a topology of another number of ranks.
  Grid(Group& world, Topology topology);

  Group& world() const { return world_; }
  const Topology& topology() const { return topology_; }

  /// The group of the ranks that differ from this one only in their positions on `axes`, such as {"data", "sequence"}
  /// (in any order). If all of these have size 1 it is this rank alone, for tensors on the host. Its name says the
  /// positions on the other axes and then `axes`: "pipe1/data-sequence".
  /// Throws    ConfigError: an axis that is not in the topology.
  Group& along(const std::vector<std::string>& axes) const;

  /// The world rank of rank `rank` of `group`, a group of the grid or split from one.
  int world_rank_of(const Group& group, int rank) const { return group.world_rank(rank); }
  /// This rank's position on `axis`; 0 for an axis that is not there.
  int position_on(std::string_view axis) const { return topology_.position_of(world_.rank(), axis); }
  /// This rank's positions on the axes longer than 1, for texts: "pipe 1, data 3".
  std::string where() const;

 private:
  /// Axes longer than 1.
  using Axes = std::set<std::string>;
  std::string name_of(const Axes& axes) const;

  Group& world_;
  const Topology topology_;
  std::map<Axes, std::unique_ptr<Group>> groups_;
};

}  // namespace trireme
