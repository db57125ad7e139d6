#include "trireme/training/groups.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"
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
  Group& model = &groups.model == &groups.shards ? shards : served(groups.model);
  Group* const sequence = groups.sequence != nullptr ? &served(*groups.sequence) : nullptr;
  return {.shards = shards,
          .model = model,
          .place = groups.place,
          .sequence = sequence,
          .stages = groups.stages,
          .topology = std::move(groups.topology),
          .grid = std::move(groups.grid),
          .own = std::move(own)};
}

TrainingGroups host_groups_of(const Grid& grid) {
  const Topology& topology = grid.topology();
  for (const Axis& axis : topology.axes())
    if (axis.size > 1 && axis.name != "data" && axis.name != "sequence" && axis.name != "pipe")
      throw ConfigError(str("axis \"", axis.name, "\" of ", axis.size,
                            " ranks is not there yet; use \"pipe\", \"data\" and \"sequence\""),
                        ErrorCode::kUnsupported);
  const bool has_stages = topology.size_of("pipe") > 1, cuts_samples = topology.size_of("sequence") > 1;
  if (has_stages && cuts_samples)
    throw ConfigError(
        str("axes \"pipe\" of ", topology.size_of("pipe"), " and \"sequence\" of ", topology.size_of("sequence"),
            " ranks: a pipeline does not send parts of sequences yet; make one of the two 1"),
        ErrorCode::kUnsupported);
  std::vector<std::string> shards;
  for (const char* axis : {"data", "sequence"})
    if (topology.has(axis)) shards.emplace_back(axis);
  return {.shards = grid.along(shards),
          .model = grid.world(),
          .place = {.rank = grid.position_on("data"), .size = topology.size_of("data")},
          .sequence = cuts_samples ? &grid.along({"sequence"}) : nullptr,
          .stages = has_stages ? &grid.along({"pipe"}) : nullptr,
          .topology = topology.axes()};
}

}  // namespace

TrainingGroups groups_of(const Grid& grid, c10::Device device) { return on_device(host_groups_of(grid), device); }

TrainingGroups groups_of(Group& world, const Degrees& degrees, c10::Device device) {
  if (degrees.sequence == 1 || degrees.data * degrees.sequence != world.size())
    return on_device({.shards = world,
                      .model = world,
                      .place = {.rank = world.rank(), .size = world.size()},
                      .topology = {{"data", world.size()}}},
                     device);
  auto grid = std::make_unique<Grid>(world, Topology({{"data", degrees.data}, {"sequence", degrees.sequence}}));
  TrainingGroups groups = host_groups_of(*grid);
  groups.grid = std::move(grid);
  return on_device(std::move(groups), device);
}

void check_degrees(const Degrees& degrees, const std::vector<Axis>& topology) {
  const std::pair<const char*, int> others[] = {
      {"pipe", degrees.pipe}, {"tensor", degrees.tensor}, {"sequence", degrees.sequence}, {"expert", degrees.expert}};
  for (const auto& [name, degree] : others) {
    const auto axis = std::find_if(topology.begin(), topology.end(), [&](const Axis& it) { return it.name == name; });
    const int size = axis == topology.end() ? 1 : axis->size;
    if (degree == size) continue;
    if (name == std::string_view("pipe"))
      throw ConfigError(
          str("degrees.pipe=", degree, ", and this engine's ranks have ", size,
              " on the axis \"pipe\"; train a PipelineModule, which cuts a model into stages, or leave it 1"));
    if (name == std::string_view("sequence"))
      throw ConfigError(str("sequence_parallel_size=", degree, ", and the grid has ", size,
                            " ranks on the axis \"sequence\"; make the two the same"));
    throw ConfigError(str("degrees.", name, "=", degree, " is not there yet; leave it 1"), ErrorCode::kUnsupported);
  }
}

ReduceOp gradient_op(const TrainingGroups& groups, ReduceOp configured) {
  return groups.shards.size() != groups.place.size ? ReduceOp::kMean : configured;
}

std::vector<ShardMesh> make_meshes(TrainingGroups& groups, const Config& config) {
  Group& all = groups.shards;
  const int replicas = config.degrees.replicas;
  const bool adds = config.pager.gradient_op == ReduceOp::kSum;
  const int64_t mean_over = adds ? all.size() / groups.place.size : all.size();
  if (replicas == 1) return {{.shards = all, .mean_over = mean_over}};
  const int size = all.size() / replicas;
  std::vector<std::vector<int>> shards(replicas), same(size);
  for (int rank = 0; rank < all.size(); ++rank) {
    shards[rank / size].push_back(rank);
    same[rank % size].push_back(rank);
  }
  Group& own_shards = *groups.own.emplace_back(all.split(shards, "shards"));
  Group& own_replicas = *groups.own.emplace_back(all.split(same, "replicas"));
  return {{.shards = own_shards,
           .replicas = &own_replicas,
           .states_over_replicas = config.states_over_replicas,
           .mean_over = mean_over}};
}

}  // namespace trireme
