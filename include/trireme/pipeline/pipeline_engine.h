// Trains a PipelineModule over the ranks of a group, under DeepSpeed's names.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "trireme/comm/grid.h"
#include "trireme/comm/world.h"
#include "trireme/engine/engine_base.h"
#include "trireme/pipeline/pipeline_module.h"
#include "trireme/pipeline/stage_runner.h"

namespace trireme {

namespace detail {

/// This rank's stage, made before its Training.
struct PipelineStage {
  PipelineStage(Group& world, const PipelineModule& module, const InitializeOptions& options);
  PipelineStage(Group& world, const Topology& topology, StageModel model, const PipelineOptions& pipeline,
                const InitializeOptions& options);
  std::unique_ptr<Grid> grid;
  StageModel model;
  PipelineOptions pipeline;
  InitializeOptions options;
};

}  // namespace detail

/// The engine of this rank's stage; a schedule runs its forwards, backwards and steps. Ranks are laid out as in
/// DeepSpeed's PipeDataParallelTopology: the data-parallel ranks of a stage are neighbours. Works with every ZeRO
/// stage.
class PipelineEngine : private detail::PipelineStage, public EngineBase {
 public:
  /// Collective. `world` outlives the engine.
  /// Throws    ConfigError: a number of stages that does not divide that of the ranks; as Training's and StageRunner's.
  PipelineEngine(Group& world, const PipelineModule& module, const InitializeOptions& options = {})
      : PipelineEngine(PipelineStage(world, module, options)) {}
  /// The same for a stage that the caller has built, with ranks laid out by `topology`, whose axes are "pipe" and
  /// "data".
  PipelineEngine(Group& world, const Topology& topology, StageModel model, const PipelineOptions& pipeline,
                 const InitializeOptions& options = {})
      : PipelineEngine(PipelineStage(world, topology, std::move(model), pipeline, options)) {}

  /// As StageRunner's; StateError too: no optimizer.
  at::Tensor train_batch(const MicroBatches& data) {
    require_optimizer("train_batch");
    events().begin_step();
    events().begin_passes();
    const at::Tensor loss = runner_.train_batch(data);
    events().end_passes();
    events().drop();
    events().add_loss(loss);
    events().tell();
    return loss;
  }
  EvalResult eval_batch(const MicroBatches& data, const EvalOptions& options = {}) {
    return runner_.eval_batch(data, options);
  }
  void reset_activation_shape() { runner_.reset_activation_shape(); }
  void set_schedule(std::function<pipeline::Schedule(int stages, int micro_batches)> make) {
    runner_.set_schedule(std::move(make));
  }
  bool is_first_stage() const { return runner_.is_first_stage(); }
  bool is_last_stage() const { return runner_.is_last_stage(); }
  /// This stage's parameters and buffers, under the names of the whole model.
  const torch::nn::Module& module() const { return *model.module; }
  StageRunner& runner() { return runner_; }
  const Topology& topology() const { return grid->topology(); }

  std::optional<LoadedState> load_checkpoint(const std::filesystem::path& directory,
                                             const LoadCheckpointOptions& options = {}) override;

 private:
  explicit PipelineEngine(PipelineStage stage);
  StageRunner runner_;
};

/// Collective. As PipelineEngine's constructor.
inline PipelineEngine initialize(Group& world, PipelineModule& module, const InitializeOptions& options = {}) {
  return PipelineEngine(world, module, options);
}
inline PipelineEngine initialize(World& world, PipelineModule& module, const InitializeOptions& options = {}) {
  return PipelineEngine(*world.group, module, options);
}

}  // namespace trireme
