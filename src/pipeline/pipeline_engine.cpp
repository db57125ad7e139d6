#include "trireme/pipeline/pipeline_engine.h"

#include <iterator>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/pager/init/init.h"

namespace trireme {
namespace {

void set_stages(InitializeOptions& options, int stages) {
  Config* const config = std::get_if<Config>(&options.config);
  (config != nullptr ? config->degrees : options.degrees).pipe = stages;
}

Topology topology_of(const Group& world, const PipelineModule& module, InitializeOptions options) {
  const int stages = module.options().stages;
  if (world.size() % stages != 0)
    throw ConfigError(str("PipelineModule: stages=", stages, " does not divide the ", world.size(),
                          " ranks; start a multiple of ", stages, " ranks, or cut the model into other stages"));
  set_stages(options, stages);
  std::vector<Axis> axes = trireme::topology_of(resolved_config(options, world.size()).degrees, world.size()).axes();
  if (stages == 1) axes.insert(axes.begin(), {"pipe", 1});
  return Topology(std::move(axes));
}

/// Copies in `model` by their names, with what they follow.
std::map<std::string, std::string> copies_of(const StageModel& model) {
  std::map<const void*, std::string> followed;
  for (const Tie& tie : model.ties)
    for (size_t i = 1; i < tie.parameters.size(); ++i)
      if (tie.parameters[i].defined()) followed.emplace(tie.parameters[i].unsafeGetTensorImpl(), tie.name);
  std::map<std::string, std::string> copies;
  for (const auto& item : model.module->named_parameters())
    if (const auto found = followed.find(item.value().unsafeGetTensorImpl()); found != followed.end())
      copies.emplace(item.key(), found->second);
  return copies;
}

InitializeOptions options_of_stage(InitializeOptions options, const StageModel& model, int stages, int chunks) {
  set_stages(options, stages);
  options.unmanaged = names_of_copies(model);
  options.copies = copies_of(model);
  if (chunks > 1) {  // a stage's layers are not neighbours
    if (!options.partition_model) options.partition_model.emplace();
    options.partition_model->is_ordered = false;
  }
  return options;
}

/// The parts that rank 0 finds: measured times differ from one rank to the next.
PipelineModule with_parts_of_rank_0(const PipelineModule& module, Group& world) {
  const std::string bounds = broadcast_or_throw(world, [&] {
    std::string text;
    for (const int64_t bound : module.parts()) text += str(bound, " ");
    return text;
  });
  std::istringstream reader(bounds);
  return module.with_parts({std::istream_iterator<int64_t>(reader), {}});
}

StageModel build_stage(const PipelineModule& module, const Grid& grid) {
  if (zero::Init::is_open())
    throw ConfigError(
        "PipelineModule: a zero::Init scope is open, and its ranks do not make the same layers; close it, "
        "and set PipelineModuleOptions::sharded_init");
  std::optional<zero::Init> init;
  std::vector<std::string> shards{"data"};
  if (grid.topology().has("sequence")) shards.emplace_back("sequence");
  if (module.options().sharded_init) init.emplace(grid.along(shards), *module.options().sharded_init);
  StageModel model = module.build(grid.position_on("pipe"));
  // Copies of tied parameters are not the engine's, so they stay whole.
  const std::set<std::string> copies = names_of_copies(model);
  for (const auto& item : model.module->named_parameters())
    if (copies.contains(item.key())) zero::make_whole(item.value());
  return model;
}

}  // namespace

namespace detail {

PipelineStage::PipelineStage(Group& world, const PipelineModule& module, const InitializeOptions& options)
    : grid(std::make_unique<Grid>(world, topology_of(world, module, options))),
      model(build_stage(with_parts_of_rank_0(module, world), *grid)),
      pipeline{.schedule = module.options().schedule,
               .chunks = module.options().chunks,
               .dynamic_shapes = module.options().dynamic_shape},
      options(options_of_stage(options, model, module.options().stages, module.options().chunks)) {}

PipelineStage::PipelineStage(Group& world, const Topology& topology, StageModel model, const PipelineOptions& pipeline,
                             const InitializeOptions& options)
    : grid(std::make_unique<Grid>(world, topology)),
      model(std::move(model)),
      pipeline(pipeline),
      options(options_of_stage(options, this->model, topology.size_of("pipe"), pipeline.chunks)) {}

}  // namespace detail

PipelineEngine::PipelineEngine(PipelineStage stage)
    : PipelineStage(std::move(stage)),
      EngineBase(*grid, *model.module, with_profile(PipelineStage::options)),
      runner_(training(), *grid, model, pipeline) {}

std::optional<LoadedState> PipelineEngine::load_checkpoint(const std::filesystem::path& directory,
                                                           const LoadCheckpointOptions& options) {
  auto loaded = EngineBase::load_checkpoint(directory, options);
  runner_.follow_owners();
  return loaded;
}

}  // namespace trireme
