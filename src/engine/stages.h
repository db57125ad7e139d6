// Names, shapes and dtypes of all tensors of a model in stages, which one rank has only of its own stage.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/grid.h"
#include "trireme/pager/layout/layout.h"
#include "trireme/parallel/plan.h"
#include "trireme/topology.h"

namespace trireme {

/// The groups of ranks that an Engine works over, in the order in which they are made.
struct EngineGroups {
  ParallelPlan plan;                ///< without parameters
  Group& shards;                    ///< over which ZeRO shards: ParallelPlan::sums
  Group& model;                     ///< all ranks that step together
  Group* sequence = nullptr;        ///< ranks that share samples; null: every rank has its own
  Group* stages = nullptr;          ///< one rank of each stage; null: the model has one
  std::vector<Axis> topology = {};  ///< of `model`
  std::unique_ptr<Grid> grid = {};  ///< owner of the groups; null: the caller has them
};

/// Throws    as make_plan().
EngineGroups groups_of(const Grid& grid, const ParallelOptions& options);
/// Those of a world without a grid. Collective where samples are cut.
EngineGroups groups_of(Group& world, const ParallelOptions& options);

/// Names, shapes and dtypes of one stage's tensors.
struct StageTensors {
  std::vector<ParameterSpec> tensors;
  std::map<std::string, std::string> aliases;  ///< other name -> name
};

/// Those of all stages, in their order: `mine` alone where `stages` is null. Collective over `stages`.
/// Throws    ConfigError on every rank: a name that two stages have.
std::vector<StageTensors> tensors_of_stages(Group* stages, const StageTensors& mine);

/// The parameters of all stages, in their order.
struct WholeModel {
  std::vector<ParameterSpec> parameters;
  size_t first = 0;  ///< index of this rank's first one
};

/// Collective and throws as tensors_of_stages().
WholeModel whole_model(Group* stages, const std::vector<ParameterSpec>& mine);

}  // namespace trireme
