// The groups of ranks over which a model is trained, as the plan of all axes says.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <vector>

#include "trireme/comm/grid.h"
#include "trireme/comm/group.h"
#include "trireme/pager/pager.h"
#include "trireme/parallel/plan.h"

namespace trireme {

/// The groups of one rank.
struct TrainingGroups {
  ParallelPlan plan;                ///< without parameters
  Group& shards;                    ///< over which ZeRO shards: ParallelPlan::sums
  Group& stage;                     ///< that have the same layers, whole or slices of them, `shards` or more
  Group& model;                     ///< all ranks that step together, `stage` or more
  Group* sequence = nullptr;        ///< ranks that share samples; null: every rank has its own
  Group* tensor = nullptr;          ///< ranks that have slices of the same layers; null: layers are not cut
  Group* replicas = nullptr;        ///< ranks that hold the same shards and update them alike; null: no two do
  Group* stages = nullptr;          ///< one rank of each stage; null: the model has one
  std::vector<Axis> topology = {};  ///< of `model`
  std::unique_ptr<Grid> grid = {};  ///< owns the groups; null: the caller does
  /// Groups made for the parameters' device, and those that make_meshes() has split.
  std::vector<std::unique_ptr<Group>> own = {};
};

/// Collective where `device` needs groups of its own. Throws as make_plan().
TrainingGroups groups_of(const Grid& grid, const ParallelOptions& options, c10::Device device);
/// The groups of a world without a grid. Collective, too, where samples or layers are cut.
TrainingGroups groups_of(Group& world, const ParallelOptions& options, c10::Device device);

/// The meshes over which parameters are sharded; sets `groups.replicas`. Collective where there are replicas.
std::vector<ShardMesh> make_meshes(TrainingGroups& groups);

}  // namespace trireme
