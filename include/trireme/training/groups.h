// The groups of ranks over which a model is trained, and this rank's place in them.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "trireme/comm/grid.h"
#include "trireme/comm/group.h"
#include "trireme/config/config.h"
#include "trireme/pager/pager.h"
#include "trireme/step/micro_batch.h"

namespace trireme {

struct TrainingGroups {
  Group& shards;                    ///< over which ZeRO shards: ranks of the axes "data" and "sequence"
  Group& model;                     ///< all ranks that step together, `shards` or more
  DataPlace place;                  ///< of this rank's samples
  Group* sequence = nullptr;        ///< ranks that share samples; null: every rank has its own
  Group* stages = nullptr;          ///< one rank of each stage; null: the model has one
  std::vector<Axis> topology = {};  ///< of `model`
  std::unique_ptr<Grid> grid = {};  ///< owner of groups; null: the caller has them
  /// Owners of groups that serve the parameters' device, and of those that make_meshes() has split.
  std::vector<std::unique_ptr<Group>> own = {};
};

/// Collective where `device` needs groups of its own.
/// Throws    ConfigError: an axis other than "data", "sequence" and "pipe" that is longer than 1, or the last two both.
TrainingGroups groups_of(const Grid& grid, c10::Device device);
/// Those of a world without a grid, for the degrees of a configuration. Collective where samples are cut, too.
TrainingGroups groups_of(Group& world, const Degrees& degrees, c10::Device device);

/// Throws ConfigError: the ranks are not laid out as `degrees` has it.
void check_degrees(const Degrees& degrees, const std::vector<Axis>& topology);

/// How gradients of `groups.shards` are reduced: samples that ranks share are averaged where those of data-parallel
/// ranks are added.
ReduceOp gradient_op(const TrainingGroups& groups, ReduceOp configured);

/// The meshes over which parameters are sharded: neighbouring ranks hold the shards of one replica. Ranks of one
/// sequence have parts of the same gradients; their sum is one sample's. Collective where there are replicas.
std::vector<ShardMesh> make_meshes(TrainingGroups& groups, const Config& config);

}  // namespace trireme
