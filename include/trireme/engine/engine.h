// Trains an unmodified module over the ranks of a group. The methods have DeepSpeed's names and meanings.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/checkpoint/checkpoint.h"
#include "trireme/comm/grid.h"
#include "trireme/config/config.h"
#include "trireme/engine/forward.h"
#include "trireme/engine/options.h"
#include "trireme/engine/scopes.h"
#include "trireme/optim/optimizer.h"
#include "trireme/optim/schedule.h"
#include "trireme/pager/pager.h"
#include "trireme/parallel/plan.h"
#include "trireme/recompute/selective.h"
#include "trireme/recompute/tiled.h"
#include "trireme/sequence/sequence_parallel.h"
#include "trireme/step/train_step.h"

namespace torch::nn {
class Module;
}

namespace trireme {

class AsyncSaver;
class ForwardChecks;
class ParameterAccess;
struct EngineSetup;
struct TrainingValues;

/// Owns what training adds to a model: the pager of its parameters, and the TrainStep with masters, optimizer states
/// and counters, behind the names that DeepSpeed has for them.
///
/// Every method that says Collective is called by all ranks in the same order. Use it from the thread that made it:
/// only there are the module's operators seen, so at ZeRO stage 3 with gather="copy" no other thread can compute with
/// the module (StateError). Elsewhere another thread may run forward(), while nobody calls a method of the engine.
class Engine {
 public:
  /// Takes `module`'s parameters and buffers over; rank 0's values become everybody's. Collective.
  ///
  /// With Degrees::sequence above 1 neighbouring ranks of `group` share samples, whose tokens cut() divides.
  ///
  /// Requires  `group` and `module` outlive the engine, or its destroy(). bf16 and fp16 cast floating parameters once.
  /// Throws    before the module is changed: ConfigError and IoError as read_config; ConfigError that names a parameter or buffer
  ///           that cannot be managed, or is not the same on all ranks, and why.
  Engine(Group& group, torch::nn::Module& module, const InitializeOptions& options = {});
  /// The same along the axes of a grid: ranks along "data" take different samples, those along "sequence" the tokens of
  /// the same ones, and those along "pipe" train the other stages of a model of which `module` is one. Steps, norms and
  /// checkpoints are the whole model's. Collective over the world.
  ///
  /// Requires  the names of parameters and buffers differ from stage to stage.
  /// Throws    ConfigError too: another axis longer than 1, or "pipe" and "sequence" both; degrees that are
  ///           not the grid's.
  Engine(const Grid& grid, torch::nn::Module& module, const InitializeOptions& options = {});
  /// Local. Released parameters (ZeRO stage 3) cannot be read afterwards; destroy() gives them back.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  /// This rank's tokens of a micro-batch that its sequence group has whole, to call the module with: attention, losses
  /// and means are of all tokens then, as SequenceParallel says. `whole` itself where samples are not cut. Local.
  ///
  /// Throws    StateError: after destroy(); ShapeError: fewer than two tokens for some rank.
  SequenceInputs cut(const SequenceInputs& whole);
  /// Sequence parallelism of this engine; null where samples are not cut.
  SequenceParallel* sequence() const { return sequence_.get(); }

  /// Accumulates the gradients of `loss` and returns it detached, divided by the accumulation steps if scale_wrt_gas. A
  /// direct loss.backward() gives the same gradients. Collective at ZeRO stages 2 and 3.
  /// Throws    StateError: no optimizer, or after destroy(); ShapeError: not one floating element, or without a graph.
  at::Tensor backward(const at::Tensor& loss, const BackwardOptions& options = {});
  /// What to call backward() on directly, of any shape: `output` in fp32 times loss_scale() where something computes in
  /// fp16 (a direct backward() of what was not scaled throws StateError there), else `output` itself.
  /// Throws    as backward().
  at::Tensor scale(const at::Tensor& output) const;
  /// By what backward() and scale() multiply now; 1 where nothing computes in fp16.
  double loss_scale() const;

  /// Inside an accumulation window only counts. At its end: reduces, checks, clips, updates, advances the schedule;
  /// what is not finite skips the step on all ranks, but in bf16 without check_grad_overflow. Collective.
  ///
  /// Returns what the host knows of the step without waiting for a device.
  /// Throws    StateError: no optimizer; no gradient on any rank since the last step, or (ignore_unused_parameters=false) none for
  ///           some parameter, named; an overflow at the smallest loss scale (ZeRO stages 1 to 3; on a device it may be
  ///           told one step late). Nothing is updated then, and the window's gradients are dropped. They are also
  ///           dropped where the optimizer throws; this rank's part of the weights is then as it left it.
  StepReport step();
  /// Lets a client's optimizer change the weights between two windows, as its step() would, without gradients: no step
  /// is counted. Collective. Throws StateError: no optimizer, or inside a window.
  void step_without_gradients();
  /// Whether the next step() ends an accumulation window.
  bool is_gradient_accumulation_boundary() const;
  /// From here on `is_boundary` says that, not the count. A micro-batch still weighs 1 / gradient_accumulation_steps().
  void set_gradient_accumulation_boundary(bool is_boundary);
  /// Saves the reductions of all but the last backward pass of a window, at every ZeRO stage; a rank holds its
  /// gradients whole for that, 4 bytes per parameter (2 where 16 bits accumulate). Every rank alike.
  ///
  /// Throws    StateError: no optimizer, inside another such scope. step() inside of it throws too.
  NoSync no_sync();
  /// As no_sync(), but close() of the scope reduces, once, at every stage. Throws as no_sync().
  CoalescedReduction coalesce_grad_reduction();
  /// Drops the gradients of this window. Collective.
  void zero_grad();

  /// The last step() changed the weights. On a device this waits for it, as norm, loss scale and skipped steps do.
  bool was_step_applied() const { return step_->was_applied(); }
  /// Before clipping, of the last step; -1 if it was not finite; nothing before the first one.
  std::optional<double> get_global_grad_norm() const { return step_->outcome().norm; }
  /// Of the next step, in a parameter group (ConfigError: there is none such). 0 without an optimizer.
  double get_lr(size_t group = 0) const;
  /// For the next step, in every group, or in one; a schedule sets its own again after it.
  void set_lr(double lr, std::optional<size_t> group = {});
  /// All that the next step takes for a group. Throws as get_mom().
  const OptimizerOptions& hyperparameters(size_t group) const;
  /// The same as far as is known without waiting for a device: a schedule's values may be those of an earlier step.
  const OptimizerOptions& known_hyperparameters(size_t group) const;
  /// As set_lr(), for all of them; the kind of optimizer stays. Throws ConfigError: out of range, another kind, a
  /// momentum where initialize() was told 0, so that there is no memory for it.
  void set_hyperparameters(const OptimizerOptions& options, size_t group);
  /// momentum_of() the next step. Throws StateError: no optimizer; ConfigError: there is no such group.
  std::pair<double, double> get_mom(size_t group = 0) const;
  size_t group_count() const { return step_->known_hyperparameters().groups().size(); }
  int64_t global_steps() const { return step_->global_steps(); }
  int64_t micro_steps() const { return step_->micro_steps(); }
  int64_t skipped_steps() const { return step_->progress().skipped_steps; }
  int64_t global_samples() const { return step_->global_samples(); }

  const BatchSizes& get_batch_info() const { return config_.batch; }
  int64_t train_batch_size() const { return config_.batch.train_batch_size; }
  int64_t train_micro_batch_size_per_gpu() const { return config_.batch.train_micro_batch_size_per_gpu; }
  int64_t gradient_accumulation_steps() const { return config_.batch.gradient_accumulation_steps; }
  /// By the accumulation steps. ConfigError: not a multiple of micro-batch times ranks; StateError: inside a window.
  void set_train_batch_size(int64_t train_batch_size);
  /// And train_batch_size with it. ConfigError: not 1 or more; StateError: inside a window.
  void set_train_micro_batch_size(int64_t micro_batch_size);

  /// Saves weights, buffers, optimizer, counters and each rank's generator as `directory`/tag, at the end of a window:
  /// gradients are not saved. With async_save in the background, as AsyncSaver does. Collective.
  /// Throws    as trireme::save_checkpoint or AsyncSaver::save.
  SavedCheckpoint save_checkpoint(const std::filesystem::path& directory, const SaveCheckpointOptions& options = {});
  /// Continues where the checkpoint was saved: bit by bit at the same world size; at another one generators go their
  /// own way. Drops the window's gradients. Nothing when there is no checkpoint. Throws as trireme::load_checkpoint;
  /// after a kTornLoad everything but a good load_checkpoint() and destroy() throws StateError. Collective.
  std::optional<LoadedState> load_checkpoint(const std::filesystem::path& directory,
                                             const LoadCheckpointOptions& options = {});
  /// As AsyncSaver::wait(); the destructor and the next save or load wait too.
  std::optional<SavedCheckpoint> wait_for_checkpoint();

  /// Writes the module's weights (in the dtype that they have) and buffers into one file, unit by unit. Collective.
  /// Returns true. Throws as export_tensors(); ConfigError: an empty directory.
  bool save_16bit_model(const std::filesystem::path& directory, const SaveModelOptions& options = {});

  /// Drops units that are gathered (stage 3, gather="copy"). Every rank alike.
  void empty_partition_cache();
  /// Every state is in host memory already, which is said once. Throws ConfigError: an unknown state, another device.
  void offload_states(const OffloadOptions& options = {});
  void reload_states();

  /// Gives the parameters whole, unmanaged storage again and frees everything else. Collective. The engine is spent.
  void destroy();

  const Config& config() const { return config_; }
  /// The ranks over which ZeRO shards: with the same module, and different samples or parts of them.
  Group& group() const { return group_; }
  /// Of this rank's samples: a data set is shared by `size` ranks, and those of one sequence group have the same part.
  DataPlace data_place() const { return plan_.place; }
  Pager& pager() const;  ///< throws StateError after destroy()
  /// The error that ended a pipeline's engine: every call but destroy() throws StateError with it. Empty: nothing did.
  const std::string& failure() const { return failure_; }
  /// Bytes of masters and optimizer states on this rank.
  int64_t optimizer_bytes() const;

 protected:
  ForwardScope begin_forward();
  /// As ForwardChecks.
  void look_at(const at::Tensor& input);
  void explain_forward(const std::string& problem, const std::vector<at::ScalarType>& inputs) const;

 private:
  /// begin_forward() for who runs micro-batches by a schedule.
  ForwardScope begin_scheduled_forward();
  friend class NoSync;
  friend class CoalescedReduction;
  friend class StageRunner;
  Engine(EngineSetup setup, torch::nn::Module& module, const InitializeOptions& options);
  /// There are parameters and states: destroy() was not called.
  void require_there(const char* call) const;
  /// And nothing has ended it.
  void require_alive(const char* call) const;
  void require_intact(const char* call) const;
  void require_optimizer(const char* call) const;
  void check_whole(const at::Tensor& loss);
  void require_states(const OptimizerOptions& options, size_t group) const;
  void set_batch(const char* call, int64_t micro_batch_size, int64_t accumulation_steps);
  void defer(const char* scope);
  void take_user_writes();
  void publish_all(ClosedWindow& window);
  StateTree state(bool with_frozen, bool with_optimizer, const std::vector<std::string>& parameter_values = {});
  StateTree saved_state(bool with_frozen);
  std::vector<ShardMesh> make_meshes();
  std::string values_text(const SaveCheckpointOptions& options) const;
  void take_values(const TrainingValues& values, const std::vector<int64_t>& step_counts,
                   const LoadCheckpointOptions& options);
  void take_hyperparameters(const TrainingValues& values);
  Config config_;               ///< first: what is wrong with it is told before anything is made
  std::unique_ptr<Grid> grid_;  ///< null where the caller has one, or none is needed
  /// Null where the caller's serve the module's device.
  std::unique_ptr<Group> device_group_, device_model_group_, device_sequence_group_;
  Group& group_;             ///< over which ZeRO shards
  Group& model_;             ///< of all ranks that step together, `group_` or more
  const ParallelPlan plan_;  ///< without parameters
  /// Of `group_`: that hold the other shards, and the same ones; null: one replica.
  std::unique_ptr<Group> shards_, replicas_;
  Group* stages_;                     ///< ranks that hold the other stages of this one's model; null: there are none
  const std::vector<Axis> topology_;  ///< of `model_`
  size_t first_parameter_ = 0;        ///< in the list of the whole model's
  std::map<std::string, std::string> aliases_;  ///< other name of a tied parameter -> the name it is managed under
  std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<Pager> pager_;  ///< null after destroy()
  std::unique_ptr<TrainStep> step_;
  ShardedOptimizer* optimizer_ = nullptr;  ///< of `step_`; null where nothing can be trained, and after destroy()
  std::unique_ptr<ParameterAccess> access_;
  std::unique_ptr<SelectiveRecompute> recompute_;  ///< null unless the configuration says so
  std::unique_ptr<TiledComputation> tiled_;        ///< likewise
  std::unique_ptr<SequenceParallel> sequence_;     ///< null where samples are not cut
  std::unique_ptr<AsyncSaver> saver_;              ///< null until something is to be saved in the background
  std::unique_ptr<ForwardChecks> forward_checks_;
  std::string failure_;    ///< of a pipeline's step, after which nothing but destroy() works; empty: there was none
  std::string torn_load_;  ///< what ended a load half-way; empty: nothing did
  bool has_explained_offload_ = false;
  bool told_uncut_ = false;  ///< that no batch was cut
};

}  // namespace trireme
