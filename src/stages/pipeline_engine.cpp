#include "trireme/stages/pipeline_engine.h"

#include "trireme/base/error.h"

namespace trireme {
namespace {

Topology topology_of(const Group& world, const PipelineModule& module) {
  const int stages = module.options().stages;
  if (world.size() % stages != 0)
    throw ConfigError(str("PipelineModule: stages=", stages, " does not divide the ", world.size(),
                          " ranks; start a multiple of ", stages, " ranks, or cut the model into other stages"));
  return Topology({{"pipe", stages}, {"data", world.size() / stages}});
}

InitializeOptions options_of_stage(InitializeOptions options, const StageModel& model, int stages) {
  Degrees& degrees =
      std::holds_alternative<Config>(options.config) ? std::get<Config>(options.config).degrees : options.degrees;
  degrees.pipe = stages;
  options.unmanaged = names_of_copies(model);
  return options;
}

}  // namespace

namespace detail {

PipelineStage::PipelineStage(Group& world, const PipelineModule& module, const InitializeOptions& options)
    : grid(world, topology_of(world, module)),
      model(module.build(grid.position_on("pipe"))),
      pipeline{.schedule = module.options().schedule,
               .chunks = module.options().chunks,
               .dynamic_shapes = module.options().dynamic_shape},
      options(options_of_stage(options, model, module.options().stages)) {}

}  // namespace detail

PipelineEngine::PipelineEngine(Group& world, const PipelineModule& module, const InitializeOptions& options)
    : PipelineStage(world, module, options),
      Engine(grid, *model.module, PipelineStage::options),
      runner_(*this, grid, model, pipeline) {}

std::optional<LoadedState> PipelineEngine::load_checkpoint(const std::filesystem::path& directory,
                                                           const LoadCheckpointOptions& options) {
  auto loaded = Engine::load_checkpoint(directory, options);
  runner_.follow_owners();
  return loaded;
}

}  // namespace trireme
