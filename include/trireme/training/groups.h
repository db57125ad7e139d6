// The groups of ranks over which a model is trained, as the plan of all axes says.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/comm/grid.h"
#include "trireme/comm/group.h"
#include "trireme/pager/pager.h"
#include "trireme/parallel/plan.h"

namespace trireme {

/// The groups of one rank, which are those of the plan.
struct TrainingGroups {
  ParallelPlan plan;          ///< without parameters
  Group& sums;                ///< ranks whose gradients are parts of one sum, over which ZeRO shards
  Group& stage;               ///< ranks that have the same layers, whole or slices of them: `sums` or more
  Group& model;               ///< all ranks that step together: `stage` or more
  Group* replicas = nullptr;  ///< ranks that hold the same shards and update them alike; null: no two do
  Group* slices = nullptr;    ///< ranks that have slices of the same layers; null: layers are not cut
  Group* stages = nullptr;    ///< one rank of each stage; null: the model has one
  std::map<std::string, Group*, std::less<>> by_axis = {};  ///< of all axes but "data"
  std::unique_ptr<Grid> grid = {};                          ///< owns the groups; null: the caller does
  /// Groups made for the parameters' device, and those that make_meshes() has split.
  std::vector<std::unique_ptr<Group>> own = {};

  /// The ranks that differ from this one in their position on `axis` alone, null: there are no others.
  Group* along(std::string_view axis) const;
};

/// Collective where `device` needs groups of its own. Throws as make_plan().
TrainingGroups groups_of(const Grid& grid, const ParallelOptions& options, c10::Device device);
/// The groups of a world without a grid. Collective, too, where samples or layers are cut.
TrainingGroups groups_of(Group& world, const ParallelOptions& options, c10::Device device);

/// The meshes over which parameters are sharded; sets `groups.replicas`. Collective where there are replicas.
std::vector<ShardMesh> make_meshes(TrainingGroups& groups);

}  // namespace trireme
