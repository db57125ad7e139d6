// Trains an unmodified model over stages that own parts of it, by a step function.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/grid.h"
#include "trireme/engine/engine_base.h"
#include "trireme/ownership/ownership.h"
#include "trireme/pipeline/step_runner.h"

namespace trireme {

/// The stage of a parameter or buffer, by its name in the model. Called on every rank, which must answer alike.
using StageOf = std::function<int(const std::string& name)>;

namespace detail {

/// This stage's part of a model, made before its Training.
struct OwnedStage {
  OwnedStage(Group& world, const Topology& topology, torch::nn::Module& model, const StageOf& stage_of,
             const InitializeOptions& options, const OwnedStage* beside);
  std::shared_ptr<Grid> grid;  ///< as the ownership that of all models of a step function
  std::shared_ptr<Ownership> ownership;
  std::shared_ptr<torch::nn::Module> part;  ///< the model's tensors that are this stage's, under their names
  std::map<std::string, int> homes;         ///< the stage of each tensor of the model, by its names
  InitializeOptions options;
};

}  // namespace detail

/// The engine of this rank's stage. Parameters and buffers of other stages stay in the model, without memory; inside of
/// a step any code may use them.
///
///   StepEngine engine(world, topology, *net, [](const std::string& name) { return name.starts_with("b") ? 1 : 0; });
///   engine.step(4, [&](int micro_batch) {
///     const at::Tensor loss = …;
///     engine.backward(loss);
///     return std::vector{loss};
///   });
///   engine.update();
class StepEngine : private detail::OwnedStage, public EngineBase {
 public:
  /// `topology` has the axes "pipe" and "data", as place() gives them. Collective. `world` and `model` outlive this.
  /// Tensors of other stages get the dtypes that the configuration gives them there.
  /// Throws    ConfigError: a stage that there is not, ranks that differ in them, `trireme.recompute` = "full"; as
  ///           Training's and StepRunner's.
  StepEngine(Group& world, const Topology& topology, torch::nn::Module& model, const StageOf& stage_of,
             const StepRunnerOptions& step = {}, const InitializeOptions& options = {});
  /// The same over the ranks of `beside`, so that a step function may use both models; run by either, a step is that of
  /// both. Each has an optimizer and gradients of its own.
  /// Throws    ConfigError: as StepRunner::join(), too.
  StepEngine(StepEngine& beside, torch::nn::Module& model, const StageOf& stage_of,
             const InitializeOptions& options = {});
  ~StepEngine() override;

  /// As StepRunner's run(). Throws StateError, on every stage and before anything runs, too: a parameter is trained on
  /// one stage and frozen on another, was frozen when this was made and is trained, or has been given other memory.
  StepRunner::Outputs step(int micro_batches, const StepRunner::Program& program, const std::string& name = "") {
    training().condition().require_intact("step");
    return runner_->run(micro_batches, program, name);
  }
  void backward(const at::Tensor& root, const at::Tensor& gradient = {}) { runner_->backward(root, gradient); }
  bool has_left_program() const { return runner_->has_left(); }
  /// The optimizer's step. Throws StateError too: no optimizer; parameters, as step().
  void update() {
    require_optimizer("update");
    check_parameters();
    events().begin_step();
    runner_->end_window(training());
    events().tell();  // without a loss: a step function may have several
  }
  /// Steps are no longer this model's, which is used no more.
  void leave_steps() noexcept { runner_->leave(training()); }
  /// As EngineBase's, and leave_steps().
  void destroy();
  /// Sets the optimizer where there is none yet. As Training::set_optimizer(). Collective.
  void set_optimizer(const OptimizerChoice& choice) { training().set_optimizer(choice); }
  /// As TrainStep::divide_gradients_by().
  void divide_gradients_by(std::optional<int64_t> divisor) { training().step().divide_gradients_by(divisor); }
  /// The state of the loss scale; nothing: there is none. Waits for a device.
  std::optional<LossScaler::State> loss_scaler() { return training().step().state().loss_scaler; }
  /// Goes on with such a state. Throws as LossScaler::set_state().
  void set_loss_scaler(const LossScaler::State& scaler) {
    TrainStepState state = training().step().state();
    state.loss_scaler = scaler;
    training().step().resume(state);
  }
  /// As Buffers::keep_apart(), over the ranks that have a stage.
  void keep_buffers_apart() { training().buffers().keep_apart(); }
  /// For who follows the program's operators: its modules, regions and calls.
  using OwnedStage::ownership;
  /// `tensor`, with its numbers on `stage`: before a layer's first operators that have no parameters, so that one
  /// tensor crosses in place of several. Inside of a step.
  at::Tensor move(const at::Tensor& tensor, int stage) { return ownership->move(tensor, stage); }

  /// As Ownership's.
  at::Tensor numbers_of(const at::Tensor& tensor) { return ownership->numbers_of(tensor); }

  int stage() const { return ownership->stage(); }
  int stages() const { return ownership->stages(); }
  /// The stage that has a tensor's numbers; nothing: every stage does.
  std::optional<Home> home_of(const at::Tensor& tensor) const { return ownership->home_of(tensor); }
  /// This stage's parameters and buffers, under the names of the whole model.
  const torch::nn::Module& module() const { return *part; }
  const Topology& topology() const { return grid->topology(); }
  OwnershipCounters counters() const { return ownership->counters(); }
  StepRunner& runner() { return *runner_; }

 private:
  StepEngine(detail::OwnedStage stage, torch::nn::Module& model, const StepRunnerOptions* step,
             std::shared_ptr<StepRunner> runner);
  void check_parameters();

  struct Watched {
    std::string name;
    at::Tensor parameter;
    bool was_trained;  ///< when this was made
  };
  const std::vector<Watched> parameters_;     ///< of all stages
  const std::shared_ptr<StepRunner> runner_;  ///< that of all models of a step function
};

}  // namespace trireme
