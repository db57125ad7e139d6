// The methods that all engines share, with DeepSpeed's names and meanings. Each calls a Training.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "trireme/comm/grid.h"
#include "trireme/engine/options.h"
#include "trireme/engine/run_events.h"
#include "trireme/sequence/sequence_parallel.h"
#include "trireme/tensor/tensor_parallel.h"
#include "trireme/training/gradients.h"
#include "trireme/training/training.h"

namespace trireme {

/// The methods of every engine but forward, backward and step: a program calls these on an Engine; a schedule runs them
/// in a PipelineEngine.
///
/// Every method that says Collective is called by all ranks in the same order. Use it from the thread that made it:
/// only there are the module's operators seen, so at ZeRO stage 3 with gather="copy" no other thread can compute with
/// the module (StateError). Elsewhere another thread may run forward(), while nobody calls a method of the engine.
class EngineBase {
 public:
  EngineBase(const EngineBase&) = delete;
  EngineBase& operator=(const EngineBase&) = delete;
  virtual ~EngineBase() = default;

  /// This rank's tokens of a micro-batch that all ranks of its sequence group have; call the module with these.
  /// Attention, losses and means are then of all tokens, as SequenceParallel says. `whole` itself without sequence
  /// parallelism. Collective over the sequence group.
  ///
  /// Throws    StateError: after destroy(), or where ranks have other sizes or values; ShapeError: fewer than two
  ///           tokens for some rank.
  SequenceInputs cut(const SequenceInputs& whole);
  /// Sequence parallelism of this engine; null where samples are not cut.
  SequenceParallel* sequence() const { return passes().find<SequenceParallel>(); }
  /// Tensor parallelism of this engine; null where layers are not cut.
  TensorParallel* tensor() const { return passes().find<TensorParallel>(); }
  /// The passes over the model's operators; none after destroy().
  const OperatorPasses& passes() const { return training_.passes(); }

  /// The listeners that the configuration asks for; null: none, or after destroy().
  const Observation* observation() const { return training_.observation(); }

  /// The factor by which losses are multiplied now; 1 where nothing computes in fp16.
  double loss_scale() const { return training_.step().loss_scale().value_or(1); }
  /// Lets a client's optimizer change the weights between two windows, as its step() would, without gradients: no step
  /// is counted. Collective. Throws StateError: no optimizer, or inside a window.
  void step_without_gradients();
  /// Whether the next step() ends an accumulation window.
  bool is_gradient_accumulation_boundary() const { return training_.step().is_boundary(); }
  /// Drops the gradients of this window. Collective.
  void zero_grad();

  /// Whether the last step() changed the weights. On a device the host waits for the answer, as for norm, loss scale
  /// and skipped steps.
  bool was_step_applied() const { return training_.step().was_applied(); }
  /// The same without waiting; nothing: the device has not told yet.
  std::optional<bool> was_step_applied_if_known() const { return training_.step().applied_if_known(); }
  /// Before clipping, of the last step; -1 if it was not finite; nothing before the first one.
  std::optional<double> get_global_grad_norm() const { return training_.step().outcome().norm; }
  /// The learning rate of parameter group `group` for the next step; 0 without an optimizer. Throws ConfigError: there
  /// is no such group.
  double get_lr(size_t group = 0) const;
  /// Sets the learning rate of the next step, in one group or in all; afterwards a schedule sets its own again.
  void set_lr(double lr, std::optional<size_t> group = {});
  /// The hyperparameters of a group for the next step. Throws as get_mom().
  const OptimizerOptions& hyperparameters(size_t group) const;
  /// The same as far as is known without waiting for a device: a schedule's values may be those of an earlier step.
  const OptimizerOptions& known_hyperparameters(size_t group) const;
  /// As set_lr(), for all hyperparameters of a group. Throws ConfigError: out of range, another kind of optimizer, a
  /// momentum above 0 where it was 0 at initialize(), so that there is no memory for it.
  void set_hyperparameters(const OptimizerOptions& options, size_t group);
  /// momentum_of() the group for the next step. Throws StateError: no optimizer; ConfigError: there is no such group.
  std::pair<double, double> get_mom(size_t group = 0) const;
  size_t group_count() const { return training_.step().known_hyperparameters().groups().size(); }
  int64_t global_steps() const { return training_.step().known_progress().global_steps; }
  int64_t micro_steps() const { return training_.step().known_progress().micro_steps; }
  int64_t skipped_steps() const { return training_.step().progress().skipped_steps; }
  int64_t global_samples() const { return training_.step().known_progress().global_samples; }

  const BatchSizes& get_batch_info() const { return config().batch; }
  int64_t train_batch_size() const { return config().batch.train_batch_size; }
  int64_t train_micro_batch_size_per_gpu() const { return config().batch.train_micro_batch_size_per_gpu; }
  int64_t gradient_accumulation_steps() const { return config().batch.gradient_accumulation_steps; }
  /// Changes the accumulation steps to fit. Throws ConfigError: not a multiple of micro-batch times ranks; StateError:
  /// inside a window.
  void set_train_batch_size(int64_t train_batch_size);
  /// Changes train_batch_size with it. Throws ConfigError: below 1; StateError: inside a window.
  void set_train_micro_batch_size(int64_t micro_batch_size);

  /// As Training::save(). Collective.
  SavedCheckpoint save_checkpoint(const std::filesystem::path& directory, const SaveCheckpointOptions& options = {}) {
    const SavedCheckpoint saved = training_.save(directory, options);
    events_.note_checkpoint(saved);
    return saved;
  }
  /// As Training::load(). Collective.
  virtual std::optional<LoadedState> load_checkpoint(const std::filesystem::path& directory,
                                                     const LoadCheckpointOptions& options = {}) {
    events_.drop();
    return training_.load(directory, options);
  }
  /// As AsyncSaver::wait(); the destructor and the next save or load wait too.
  std::optional<SavedCheckpoint> wait_for_checkpoint() { return training_.wait_for_save(); }
  /// As Training::export_weights(). Collective. Returns true.
  bool save_16bit_model(const std::filesystem::path& directory, const SaveModelOptions& options = {});

  /// Releases gathered units (ZeRO stage 3, gather="copy"). Call it on every rank alike.
  void empty_partition_cache();
  /// Moves nothing: states of a model on the host are in host memory already, which is logged once. Throws ConfigError:
  /// an unknown state, a device other than "cpu", or a model on a GPU (kUnsupported; use offload_optimizer).
  void offload_states(const OffloadOptions& options = {});
  void reload_states() { require_optimizer("reload_states"); }

  /// The monitors that the configuration switches on, and what they are told (docs/observe.md); a program may add to
  /// both.
  RunEvents& events() { return events_; }

  /// Gives the parameters whole, unmanaged storage again and frees everything else. Collective. The engine cannot be
  /// used afterwards.
  void destroy() {
    events_.end();
    training_.destroy();
  }

  const Config& config() const { return training_.config(); }
  /// The ranks over which ZeRO shards: they have the same module, and different samples or parts of samples.
  Group& group() const { return training_.groups().sums; }
  /// Which part of a data set this rank reads: part `rank` of `size`. Ranks that share samples or layers get the same.
  int copies_of_gradients() const { return trireme::copies_of_gradients(training_); }  ///< as training/gradients.h
  DataPlace data_place() const { return training_.groups().plan.place; }
  Pager& pager() const { return training_.pager(); }  ///< throws StateError after destroy()
  /// The error that ended a pipeline's engine: every call but destroy() throws StateError with it. Empty: none has.
  const std::string& failure() const { return training_.condition().failure(); }
  DiskUse disk_use() const { return training_.disk_use(); }  ///< as Training has it
  /// Bytes of masters and optimizer states on this rank.
  int64_t optimizer_bytes() const;

 protected:
  EngineBase(Group& group, torch::nn::Module& module, const InitializeOptions& options)
      : training_(group, module, events_.opening(options)) {
    events_.follow(training_, module);
  }
  EngineBase(const Grid& grid, torch::nn::Module& module, const InitializeOptions& options)
      : training_(grid, module, events_.opening(options)) {
    events_.follow(training_, module);
  }

  Training& training() { return training_; }
  const Training& training() const { return training_; }
  /// Throws StateError that names `call`: nothing can be trained.
  void require_optimizer(const char* call) const;

 private:
  void require_states(const OptimizerOptions& options, size_t group) const;

  RunEvents events_;  // which the training opens
  Training training_;
  bool has_explained_offload_ = false;
};

}  // namespace trireme
