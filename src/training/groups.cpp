#include "trireme/training/groups.h"

#include <algorithm>
#include <initializer_list>
#include <iterator>
#include <string>
#include <utility>

#include "trireme/comm/device_group.h"

namespace trireme {

namespace {

/// Groups that serve `device`, in place of those that do not.
TrainingGroups on_device(TrainingGroups groups, c10::Device device) {
  std::vector<std::unique_ptr<Group>> own;
  const auto served = [&](Group& group) -> Group& {
    std::unique_ptr<Group> made;
    Group& result = group_for(group, device, made);
    if (made) own.push_back(std::move(made));
    return result;
  };
  Group& shards = served(groups.shards);
  Group& stage = &groups.stage == &groups.shards ? shards : served(groups.stage);
  Group& model = &groups.model == &groups.stage ? stage : served(groups.model);
  Group* const sequence = groups.sequence != nullptr ? &served(*groups.sequence) : nullptr;
  Group* const tensor = groups.tensor != nullptr ? &served(*groups.tensor) : nullptr;
  return {.plan = std::move(groups.plan),
          .shards = shards,
          .stage = stage,
          .model = model,
          .sequence = sequence,
          .tensor = tensor,
          .stages = groups.stages,
          .topology = std::move(groups.topology),
          .grid = std::move(groups.grid),
          .own = std::move(own)};
}

TrainingGroups host_groups_of(const Grid& grid, ParallelPlan plan) {
  const Topology& topology = grid.topology();
  const auto along = [&](std::initializer_list<const char*> names) -> Group& {
    std::vector<std::string> axes;
    std::copy_if(names.begin(), names.end(), std::back_inserter(axes),
                 [&](const char* axis) { return topology.has(axis); });
    return grid.along(axes);
  };
  Group* const sequence = plan.sequence.size() > 1 ? &grid.along({"sequence"}) : nullptr;
  Group* const tensor = plan.tensor.size() > 1 ? &grid.along({"tensor"}) : nullptr;
  Group* const stages = plan.stages.size() > 1 ? &grid.along({"pipe"}) : nullptr;
  return {.plan = std::move(plan),
          .shards = along({"data", "sequence"}),
          .stage = along({"data", "sequence", "tensor"}),
          .model = grid.world(),
          .sequence = sequence,
          .tensor = tensor,
          .stages = stages,
          .topology = topology.axes()};
}

}  // namespace

TrainingGroups groups_of(const Grid& grid, const ParallelOptions& options, c10::Device device) {
  return on_device(host_groups_of(grid, make_plan(grid.topology(), grid.world().rank(), options)), device);
}

TrainingGroups groups_of(Group& world, const ParallelOptions& options, c10::Device device) {
  const Degrees whole_models = {
      .data = options.degrees.data, .tensor = options.degrees.tensor, .sequence = options.degrees.sequence};
  const Topology topology = topology_of(whole_models, world.size());
  ParallelPlan plan = make_plan(topology, world.rank(), options);
  if (plan.sequence.size() == 1 && plan.tensor.size() == 1)
    return on_device(
        {.plan = std::move(plan), .shards = world, .stage = world, .model = world, .topology = topology.axes()},
        device);
  auto grid = std::make_unique<Grid>(world, topology);
  TrainingGroups groups = host_groups_of(*grid, std::move(plan));
  groups.grid = std::move(grid);
  return on_device(std::move(groups), device);
}

std::vector<ShardMesh> make_meshes(TrainingGroups& groups) {
  const ParallelPlan& plan = groups.plan;
  if (plan.replicas.size() == 1) return {{.shards = groups.shards, .mean_over = plan.mean_over}};
  const std::vector<int>& members = plan.sums.of(plan.rank);
  Group& shards = *groups.own.emplace_back(groups.shards.split(positions_in(members, plan.shards), "shards"));
  Group& replicas = *groups.own.emplace_back(groups.shards.split(positions_in(members, plan.replicas), "replicas"));
  if (!plan.states_over_replicas) groups.replicas = &replicas;
  return {{.shards = shards,
           .replicas = &replicas,
           .states_over_replicas = plan.states_over_replicas,
           .mean_over = plan.mean_over}};
}

}  // namespace trireme
