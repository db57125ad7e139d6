#include "trireme/training/groups.h"

#include <set>
#include <utility>

#include "trireme/comm/device_group.h"

namespace trireme {

namespace {

/// Groups that serve `device`, in place of those that do not. Along an axis without a SharedGradient ranks have other
/// parameters, and send what they choose to: that group stays.
TrainingGroups on_device(TrainingGroups groups, c10::Device device) {
  std::map<Group*, Group*> served;
  const auto serve = [&](Group& group) -> Group& {
    Group*& there = served[&group];
    if (there != nullptr) return *there;
    std::unique_ptr<Group> made;
    there = &group_for(group, device, made);
    if (made) groups.own.push_back(std::move(made));
    return *there;
  };
  Group& sums = serve(groups.sums);
  Group& stage = serve(groups.stage);
  Group& model = serve(groups.model);
  for (const PlannedAxis& axis : groups.plan.axes)
    if (const auto found = groups.by_axis.find(axis.part->name); found != groups.by_axis.end() && axis.part->law)
      found->second = &serve(*found->second);
  Group* const slices = groups.slices != nullptr ? &serve(*groups.slices) : nullptr;
  return {.plan = std::move(groups.plan),
          .sums = sums,
          .stage = stage,
          .model = model,
          .slices = slices,
          .stages = groups.stages,
          .by_axis = std::move(groups.by_axis),
          .grid = std::move(groups.grid),
          .own = std::move(groups.own)};
}

TrainingGroups host_groups_of(const Grid& grid, ParallelPlan plan) {
  const auto along = [&](const RankGroups& groups) -> Group& {
    std::set<std::string> axes;  // of the grid, which has "data" for "replica" and "shard"
    for (const std::string& axis : groups.axes) axes.insert(grid.topology().has(axis) ? axis : "data");
    return grid.along({axes.begin(), axes.end()});
  };
  std::map<std::string, Group*, std::less<>> by_axis;
  for (const Axis& axis : grid.topology().axes())
    if (axis.size > 1 && axis.name != "data") by_axis[axis.name] = &grid.along({axis.name});
  Group& sums = along(plan.sums);
  Group& stage = along(plan.stage);
  Group* const slices = plan.slices.size() > 1 ? &along(plan.slices) : nullptr;
  Group* const stages = plan.stages.size() > 1 ? &along(plan.stages) : nullptr;
  return {.plan = std::move(plan),
          .sums = sums,
          .stage = stage,
          .model = grid.world(),
          .slices = slices,
          .stages = stages,
          .by_axis = std::move(by_axis)};
}

}  // namespace

Group* TrainingGroups::along(std::string_view axis) const {
  const auto found = by_axis.find(axis);
  return found != by_axis.end() ? found->second : nullptr;
}

TrainingGroups groups_of(const Grid& grid, const ParallelOptions& options, c10::Device device) {
  return on_device(host_groups_of(grid, make_plan(grid.topology(), grid.world().rank(), options)), device);
}

TrainingGroups groups_of(Group& world, const ParallelOptions& options, c10::Device device) {
  Degrees whole_models = options.degrees;
  for (const AxisPart* axis : all_axes())
    if (!axis->law && axis->degree != nullptr) whole_models.*axis->degree = 1;
  const Topology topology = topology_of(whole_models, world.size());
  ParallelPlan plan = make_plan(topology, world.rank(), options);
  if (topology.axes().size() == 1)
    return on_device({.plan = std::move(plan), .sums = world, .stage = world, .model = world}, device);
  auto grid = std::make_unique<Grid>(world, topology);
  TrainingGroups groups = host_groups_of(*grid, std::move(plan));
  groups.grid = std::move(grid);
  return on_device(std::move(groups), device);
}

std::vector<ShardMesh> make_meshes(TrainingGroups& groups) {
  const ParallelPlan& plan = groups.plan;
  const RankGroups& same_shards = plan.along(replica_axis().name);
  if (same_shards.size() == 1) return {{.shards = groups.sums, .mean_over = plan.mean_over}};
  const std::vector<int>& members = plan.sums.of(plan.rank);
  Group& shards = *groups.own.emplace_back(groups.sums.split(positions_in(members, plan.shards), "shards"));
  Group& replicas = *groups.own.emplace_back(groups.sums.split(positions_in(members, same_shards), "replicas"));
  if (!plan.states_over_replicas) groups.replicas = &replicas;
  return {{.shards = shards,
           .replicas = &replicas,
           .states_over_replicas = plan.states_over_replicas,
           .mean_over = plan.mean_over}};
}

}  // namespace trireme
