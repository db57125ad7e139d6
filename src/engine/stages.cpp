#include "engine/stages.h"

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/comm/agreement.h"

namespace trireme {

namespace {

std::string to_text(const StageTensors& stage) {
  Json tensors = Json::array();
  for (const ParameterSpec& tensor : stage.tensors)
    tensors.push_back({tensor.name, tensor.shape, static_cast<int>(tensor.dtype), tensor.trainable});
  return Json{{"tensors", tensors}, {"aliases", stage.aliases}}.dump();
}

StageTensors parse_stage(const std::string& text) {
  const Json json = Json::parse(text);
  StageTensors stage;
  for (const Json& tensor : json["tensors"])
    stage.tensors.push_back({tensor[0].get<std::string>(), tensor[1].get<std::vector<int64_t>>(),
                             static_cast<at::ScalarType>(tensor[2].get<int>()), tensor[3].get<bool>()});
  stage.aliases = json["aliases"].get<std::map<std::string, std::string>>();
  return stage;
}

}  // namespace

EngineGroups groups_of(const Grid& grid, const ParallelOptions& options) {
  const Topology& topology = grid.topology();
  ParallelPlan plan = make_plan(topology, grid.world().rank(), options);
  std::vector<std::string> shards;
  for (const char* axis : {"data", "sequence"})
    if (topology.has(axis)) shards.emplace_back(axis);
  Group* const sequence = plan.sequence.size() > 1 ? &grid.along({"sequence"}) : nullptr;
  Group* const stages = plan.stages.size() > 1 ? &grid.along({"pipe"}) : nullptr;
  return {.plan = std::move(plan),
          .shards = grid.along(shards),
          .model = grid.world(),
          .sequence = sequence,
          .stages = stages,
          .topology = topology.axes()};
}

EngineGroups groups_of(Group& world, const ParallelOptions& options) {
  const Degrees whole_models = {.data = options.degrees.data, .sequence = options.degrees.sequence};
  const Topology topology = topology_of(whole_models, world.size());
  ParallelPlan plan = make_plan(topology, world.rank(), options);
  if (plan.sequence.size() == 1)
    return {.plan = std::move(plan), .shards = world, .model = world, .topology = topology.axes()};
  auto grid = std::make_unique<Grid>(world, topology);
  EngineGroups groups = groups_of(*grid, options);
  groups.grid = std::move(grid);
  return groups;
}

std::vector<StageTensors> tensors_of_stages(Group* stages, const StageTensors& mine) {
  if (stages == nullptr) return {mine};
  std::vector<StageTensors> all;
  std::map<std::string, int> stage_of;
  for (const std::string& text : gather_or_throw(*stages, [&] { return to_text(mine); })) {
    const int stage = static_cast<int>(all.size());
    for (const ParameterSpec& tensor : all.emplace_back(parse_stage(text)).tensors)
      if (const auto [known, is_new] = stage_of.emplace(tensor.name, stage); !is_new)
        throw ConfigError(str("'", tensor.name, "' is a tensor of stage ", known->second, " and of stage ", stage,
                              " of the pipeline; give them different names, or tie them (TiedLayer)"));
  }
  return all;
}

WholeModel whole_model(Group* stages, const std::vector<ParameterSpec>& mine) {
  WholeModel model;
  const std::vector<StageTensors> all = tensors_of_stages(stages, {mine, {}});
  for (size_t stage = 0; stage < all.size(); ++stage) {
    if (stages != nullptr && static_cast<int>(stage) == stages->rank()) model.first = model.parameters.size();
    model.parameters.insert(model.parameters.end(), all[stage].tensors.begin(), all[stage].tensors.end());
  }
  return model;
}

}  // namespace trireme
