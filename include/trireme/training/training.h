// The one core below every façade: a model that is trained, over groups of ranks, by steps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/checkpoint/checkpoint.h"
#include "trireme/comm/grid.h"
#include "trireme/config/config.h"
#include "trireme/pager/pager.h"
#include "trireme/step/train_step.h"
#include "trireme/tensor/partition.h"
#include "trireme/training/condition.h"
#include "trireme/training/forward.h"
#include "trireme/training/groups.h"
#include "trireme/training/operator_passes.h"
#include "trireme/training/options.h"

namespace torch::nn {
class Module;
}

namespace trireme {

class AsyncSaver;
class ForwardChecks;
class Observation;
class StepCounts;
class ToldStatus;
class ParameterAccess;
struct ModuleTensors;
struct PreparedOptimizer;
struct TrainingValues;

/// Owns what training adds to a model: the pager of its parameters, the passes over its operators, and the TrainStep
/// with masters, optimizer states and counters. DeepSpeed's engine and a pipeline's stage are façades of it.
///
/// An optimizer comes with the configuration, later by set_optimizer(), or never: backward passes need none.
///
/// A method that says Collective is called by all ranks in the same order. Use it from the thread that made it: only
/// there are the module's operators seen.
class Training {
 public:
  /// Takes `module`'s parameters and buffers over; rank 0's values become everybody's. With Degrees::sequence above 1
  /// neighbouring ranks of `group` share samples. With Degrees::tensor above 1 they share samples and layers:
  /// parameters become slices of rank 0's, and stay that after destroy(). Collective.
  ///
  /// Requires  `group` and `module` outlive this, or its destroy(). bf16 and fp16 cast floating parameters once.
  /// Throws    before the module is changed: ConfigError that names a key, or a parameter or buffer that cannot be
  ///           managed, or is not the same on all ranks, and why.
  Training(Group& group, torch::nn::Module& module, const TrainingOptions& options);
  /// The same along the axes of a grid: ranks along "data" take different samples, those along "sequence" the tokens of
  /// the same ones, those along "tensor" have slices of the same layers, and those along "pipe" train the other stages
  /// of a model of which `module` is one. Steps, norms and checkpoints are the whole model's. Collective over the
  /// world.
  ///
  /// Requires  the names of parameters and buffers differ from stage to stage.
  /// Throws    ConfigError too: another axis longer than 1, or axes that do not go together (exclusions()); degrees
  ///           that are not the grid's.
  Training(const Grid& grid, torch::nn::Module& module, const TrainingOptions& options);
  /// Local. Released parameters (ZeRO stage 3) cannot be read afterwards; destroy() gives them back.
  ~Training();
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  const Config& config() const { return config_; }
  const TrainingGroups& groups() const { return groups_; }
  /// The cut of layers over the axis "tensor"; null: layers are not cut.
  const PartitionPlan* partition() const { return partition_ ? &*partition_ : nullptr; }
  /// The elements of the whole model's parameters, over all stages, tied ones once; 0 where the program has cut layers
  /// itself, whose wholes it alone knows.
  int64_t parameter_count() const { return parameter_count_; }
  Pager& pager() const;  ///< throws StateError after destroy()
  /// The object that runs backward passes and steps, with their counters.
  TrainStep& step() const { return *step_; }
  Buffers& buffers() const { return *buffers_; }
  const OperatorPasses& passes() const { return passes_; }  ///< none after destroy()
  /// By weights and states of this rank on disk, in gathers and updates; zeros: there are none.
  DiskUse disk_use() const;
  Condition& condition() { return condition_; }
  const Condition& condition() const { return condition_; }

  /// The listeners that the configuration asks for; null: none, or after destroy().
  const Observation* observation() const { return observation_.get(); }

  /// The counters of steps that this process tells whoever asks it (`trireme top`).
  StepCounts& counts() const { return *counts_; }

  /// Opens a forward of the module. Throws StateError: after destroy(); at ZeRO stage 3 with gather="copy", in another
  /// thread.
  ForwardScope begin_forward();
  /// Sets the optimizer where there is none yet. Collective.
  ///
  /// Throws    before anything is changed: StateError: as TrainStep::require_ready_for_optimizer(), or after destroy();
  ///           ConfigError: it is empty, cannot be stepped, or nothing can be trained.
  void set_optimizer(const OptimizerChoice& choice);
  /// Changes the batch sizes between two windows. Throws StateError that names `call`: within a window, after
  /// destroy().
  void set_batch(const char* call, int64_t micro_batch_size, int64_t accumulation_steps);

  /// Saves weights, buffers, optimizer, counters and each rank's generator as `directory`/tag, at the end of a window:
  /// gradients are not saved. With async_save in the background, as AsyncSaver does. Collective.
  /// Throws    as trireme::save_checkpoint or AsyncSaver::save.
  SavedCheckpoint save(const std::filesystem::path& directory, const SaveCheckpointOptions& options);
  /// Continues where the checkpoint was saved: bit by bit at the same world size; at another one random number
  /// generators are not restored. Drops the window's gradients. Nothing when there is no checkpoint. Throws as
  /// trireme::load_checkpoint; after a kTornLoad everything but a good load() and destroy() throws StateError.
  /// Collective.
  std::optional<LoadedState> load(const std::filesystem::path& directory, const LoadCheckpointOptions& options);
  /// As AsyncSaver::wait(); the destructor and the next save or load wait too.
  std::optional<SavedCheckpoint> wait_for_save();
  /// Writes the module's weights (in the dtype that they have) and buffers into one file, unit by unit. Collective.
  /// Throws    as export_tensors(); ConfigError: an empty directory.
  void export_weights(const std::filesystem::path& directory, const SaveModelOptions& options);

  /// Gives the parameters whole, unmanaged storage again and frees everything else. Collective.
  void destroy();

 private:
  void assemble(torch::nn::Module& module, const TrainingOptions& options);
  void observe(c10::Device device);
  void tell_status(c10::Device device, const std::filesystem::path& folder);
  void install(PreparedOptimizer prepared);
  void manage(torch::nn::Module& module, ModuleTensors tensors, const TrainingOptions& options, PagerPolicy policy);
  std::function<void()> proof();
  std::unique_ptr<ParameterAccess> make_access(ShardedOptimizer* optimizer) const;
  void reserve_save();
  void take_user_writes();
  void publish_all(ClosedWindow& window);
  StateTree state(bool with_frozen, bool with_optimizer, const std::vector<std::string>& parameter_values = {});
  StateTree saved_state(bool with_frozen);
  std::string values_text(const SaveCheckpointOptions& options) const;
  void take_values(const TrainingValues& values, const std::vector<int64_t>& step_counts,
                   const LoadCheckpointOptions& options);
  void take_hyperparameters(const TrainingValues& values);

  Config config_;
  std::map<at::ScalarType, int64_t> loaded_bytes_;  ///< of parameters, by dtype, as the program gave them
  Condition condition_;
  TrainingGroups groups_;
  std::optional<PartitionPlan> partition_;       ///< nothing: layers are not cut by rules
  std::optional<PartitionPlan> program_slices_;  ///< nothing: the program has cut no layers
  std::vector<NamedParameter> slices_;           ///< the module's parameters, where layers are cut
  int64_t parameter_count_ = 0;
  size_t first_parameter_ = 0;                  ///< in the list of the whole model's
  std::map<std::string, std::string> aliases_;  ///< other name of a tied parameter -> the name it is managed under
  std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<Pager> pager_;  ///< null after destroy()
  std::unique_ptr<TrainStep> step_;
  std::unique_ptr<ParameterAccess> access_;
  OperatorPasses passes_;
  std::unique_ptr<Observation> observation_;
  std::shared_ptr<StepCounts> counts_;
  std::unique_ptr<ToldStatus> told_status_;  ///< null after destroy()
  std::unique_ptr<AsyncSaver> saver_;        ///< null until something is to be saved in the background
  std::unique_ptr<ForwardChecks> forward_checks_;
};

}  // namespace trireme
