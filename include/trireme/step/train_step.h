// The training step as the ZeRO paper has it, without a module and without a loss: gradients come in by backward
// passes, and a step closes their window, decides, updates, publishes and opens the next one.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/optim/optimizer.h"
#include "trireme/pager/pager.h"
#include "trireme/precision/precision.h"
#include "trireme/precision/scaled_passes.h"
#include "trireme/step/accumulation_window.h"
#include "trireme/step/buffers.h"
#include "trireme/step/hyperparameters.h"
#include "trireme/step/micro_batch.h"
#include "trireme/step/progress.h"

namespace trireme {

struct Agreement;
class StepAgreement;
class StepDecider;

/// The objects that a TrainStep works on. Groups, pager and buffers outlive it, or its release().
struct TrainStepParts {
  Group& shards;    ///< ranks over which gradients are reduced: the pager's
  Group& model;     ///< all ranks that step together, its rank 0 the one that logs: `shards`, or more ranks
  DataPlace place;  ///< of this rank's samples
  Pager& pager;
  Buffers& buffers;
  std::unique_ptr<ShardedOptimizer> optimizer = {};  ///< null: set_optimizer() gives one before a step(), or never
  Hyperparameters hyperparameters;
  /// Checks the gradients of a closed window before the update; empty: no check. If it throws, it does so on every rank
  /// of the model, and the step ends.
  std::function<void()> prove = {};
  /// Called on every rank of the model with the error of an update that has failed on one (may_fail_alone): ranks have
  /// weights of two steps from then on. Empty: nothing is done.
  std::function<void(const std::string& why)> spoil = {};
  /// Called when a window has ended, with the counters after it. Empty: nothing is done.
  std::function<void(const TrainingProgress&)> ended = {};
};

/// Options of a TrainStep.
struct TrainStepOptions {
  int64_t micro_batch_size = 1;  ///< samples of one rank's backward pass
  int64_t accumulation_steps = 1;
  bool managed_accumulation = true;      ///< false: every step() ends a window
  bool ignore_unused_parameters = true;  ///< false: a trainable parameter without a gradient is an error
  double max_norm = 0;                   ///< of the gradients; 0: no clipping
  int64_t steps_per_print = 0;           ///< 0: never
  /// An update may fail on one rank, as where a disk has states: ranks agree on each, by a collective more, and throw
  /// its error together.
  bool may_fail_alone = false;
  PrecisionOptions precision = {};
};

/// Throws StateError that names `call`: the engine was destroyed.
[[noreturn]] void refuse_destroyed(const char* call);

/// The core of an Engine, and of anything else that trains: a pipeline's stage, a program that calls
/// optimizer.step(). Call all methods from the thread that made it.
class TrainStep {
 public:
  /// Collective where the pager is deterministic, and on a device where `model` is more than `shards`.
  TrainStep(TrainStepParts parts, const TrainStepOptions& options);
  ~TrainStep();
  TrainStep(const TrainStep&) = delete;
  TrainStep& operator=(const TrainStep&) = delete;

  /// The optimizer by which step() updates from now on, and its hyperparameters.
  /// Throws    as require_ready_for_optimizer().
  void set_optimizer(std::unique_ptr<ShardedOptimizer> optimizer, Hyperparameters hyperparameters);
  /// The loss scale that comes with the optimizer, in place of the configuration's. Before set_optimizer().
  /// Throws    ConfigError: as check_loss_scale().
  void set_loss_scale(const LossScaleChoice& choice);
  /// Throws StateError: there is an optimizer already; in fp16, whose loss scale comes with an optimizer, this window
  /// has gradients without it.
  void require_ready_for_optimizer() const;

  /// The root for backward(): `output` in fp32 times the loss scale where something computes in fp16, else `output`.
  /// Throws    as check_has_graph().
  at::Tensor scale(const at::Tensor& output) const;
  struct PassOptions {
    bool retain_graph = false;      ///< another backward goes through the same graph
    bool create_graph = false;      ///< gradients of gradients will be taken
    bool ends_micro_batch = false;  ///< it is the micro-batch's last pass; false: step() ends the micro-batch
    /// It is a piece of a pass, which the next call goes on with: the pass counts once, and ends with its last piece.
    bool goes_on = false;
    torch::autograd::edge_list to = {};  ///< leaves that get gradients; empty: all
  };
  /// A backward pass from `outputs`, whose `gradients` carry the loss scale where there is one: by scale() of the
  /// output, or by the pass that they come from. Without `outputs` the pass reaches nothing here, and is one all the
  /// same. Collective at ZeRO stages 2 and 3, where only the last piece of a pass sends what is incomplete.
  ///
  /// Throws    Error(kInternal): a piece that ends a micro-batch and goes on.
  void backward_from(const torch::autograd::edge_list& outputs, const std::vector<at::Tensor>& gradients,
                     const PassOptions& options);

  /// Inside an accumulation window only counts. At its end closes the window, agrees with all ranks of the model on
  /// norm and gradients, decides, updates, publishes and opens the next window. Collective.
  ///
  /// Cost      beside reductions and publishing, one all-gather over `model`, and Buffers::follow_rank_0().
  /// Throws    StateError: no optimizer; in a scope in which nothing is reduced; no gradient on any rank; with
  ///           ignore_unused_parameters=false, none for some parameter; an overflow at the smallest loss scale. The
  ///           window's gradients are dropped then, and where the optimizer throws.
  StepReport step();
  /// Ends a window after the backward passes of all accumulation_steps() micro-batches, without step() calls in
  /// between: for micro-batches that a pipeline's schedule runs. Collective. Throws as step().
  StepReport end_window();
  /// In deterministic mode, seeds random numbers for this rank's micro-batch number `micro_batch` of the window.
  void start_micro_batch(int64_t micro_batch) const;
  bool is_deterministic() const { return streams_.has_value(); }
  /// The optimizer's step() between two windows, without gradients: no step is counted. Collective.
  void step_without_gradients();
  /// Drops the gradients of this window. Collective.
  void zero_grad();
  /// Begins another window, after a load has dropped the gradients of this one. Local.
  void restart_window();

  /// Whether the next step() ends the window.
  bool is_boundary() const;
  /// Throws StateError: managed_accumulation is false.
  void set_boundary(bool is_boundary);
  /// While `scope` (its name; null: no longer) lasts, backward passes reduce nothing. Throws StateError: within
  /// another.
  void defer(const char* scope);
  /// Throws StateError that names `call`: inside a window.
  void require_no_window(const char* call) const;
  /// Warns once of many backward passes without a step().
  void tell_missing_step();
  /// Changes the batch sizes. Requires  no window is open.
  void set_batch(int64_t micro_batch_size, int64_t accumulation_steps);
  /// Gradients are divided by `divisor` from now on (1: a window's are summed); nothing: by accumulation_steps().
  /// Requires  no window is open.
  void divide_gradients_by(std::optional<int64_t> divisor);
  int64_t accumulation_steps() const { return options_.accumulation_steps; }

  /// The last step() changed the weights. Waits for a device, as outcome(), progress(), loss_scale(), state() and
  /// hyperparameters() do.
  bool was_applied();
  /// The same as far as is known without waiting; nothing: a device has not told yet.
  std::optional<bool> applied_if_known() const;
  StepOutcome outcome();
  const TrainingProgress& progress();
  /// The same as far as is known without waiting: skipped steps may be those of an earlier call.
  const TrainingProgress& known_progress() const { return progress_; }
  /// The hyperparameters of the next step, the same on every rank.
  Hyperparameters& hyperparameters();
  /// The same as far as is known without waiting: a schedule's learning rates may be those of an earlier step.
  Hyperparameters& known_hyperparameters() { return hyperparameters_; }
  /// Nothing where nothing computes in fp16.
  std::optional<double> loss_scale();

  TrainStepState state();
  /// Continues from a checkpoint, with the present hyperparameters. A loss scaler or seed that `state` lacks stays.
  void resume(const TrainStepState& state);

  ShardedOptimizer* optimizer() const { return optimizer_.get(); }
  /// Frees the optimizer; groups, pager and buffers are not used any more. What was counted can still be asked for;
  /// what needs them throws as refuse_destroyed().
  void release();

 private:
  void require_there(const char* call) const;
  void choose_decider();
  void update(ClosedWindow& window, const at::Tensor& sum_of_squares);
  void give_up(ClosedWindow& window);
  std::exception_ptr end_update(ClosedWindow& window, const Agreement& agreement);
  void throw_together(const std::exception_ptr& problem);
  void require_gradients(const Agreement& agreement, ClosedWindow& window);
  StepReport close(bool has_backward, int64_t micro_steps);
  void require_steppable() const;
  void finish(int64_t samples, int64_t micro_steps);
  void tell_missing_backward();
  void seed_micro_batch() const { start_micro_batch(window_.micro_steps()); }
  int64_t samples_of_window() const;

  Group& shards_;
  Group& model_;
  const DataPlace place_;
  Pager* pager_;  ///< null after release()
  Buffers& buffers_;
  std::unique_ptr<ShardedOptimizer> optimizer_;
  Hyperparameters hyperparameters_;
  std::function<void()> prove_;
  std::function<void(const std::string&)> spoil_;
  std::function<void(const TrainingProgress&)> ended_;
  TrainStepOptions options_;
  std::unique_ptr<StepDecider> decider_;
  std::unique_ptr<StepAgreement> agreement_;
  std::optional<LossScaleRule> loss_scale_rule_;  ///< set_loss_scale()
  std::optional<ScaledPasses> scaled_passes_;     ///< where something computes in fp16
  std::optional<MicroBatchStreams> streams_;      ///< in deterministic mode
  std::optional<int64_t> divisor_;                ///< divide_gradients_by()
  AccumulationWindow window_;
  TrainingProgress progress_;
  bool has_ended_window_ = false;  ///< by the last step()
  bool has_told_backward_ = false, has_told_step_ = false;
};

}  // namespace trireme
