// Runs micro-batches through one rank's parts of a model, by a schedule.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "trireme/comm/grid.h"
#include "trireme/pipeline/stage_model.h"
#include "trireme/schedule/schedule.h"
#include "trireme/training/training.h"

namespace trireme {

/// Inputs of the first layer, and labels for the loss. A stage that needs only one may leave the other None.
struct MicroBatch {
  c10::IValue inputs = {};
  c10::IValue labels = {};
};

/// Returns the next micro-batch of this data-parallel rank; nothing at the end of the data. Called on the stages with
/// the first and the last part of the model, where it must return the same micro-batches.
using MicroBatches = std::function<std::optional<MicroBatch>()>;

/// Options of a StageRunner.
struct PipelineOptions {
  std::string schedule = "1f1b";  ///< as pipeline::make_schedule() knows it
  int chunks = 1;                 ///< parts of the model on each stage; two for schedules in a V
  bool dynamic_shapes = false;    ///< shapes of activations may differ from one micro-batch to the next
};

/// Options of eval_batch().
struct EvalOptions {
  std::optional<int64_t> micro_batches = {};  ///< nothing: the accumulation steps
  bool computes_loss = true;
  bool returns_outputs = false;  ///< of the last part, on its stage
};

/// The result of eval_batch().
struct EvalResult {
  at::Tensor loss;  ///< [] fp32, the mean over micro-batches and data, on the device; undefined without one
  std::vector<c10::IValue> outputs;  ///< by micro-batch
};

/// Counts of a runner's work, for tests and reports.
struct PipelineCounters {
  int64_t instructions = 0;
  std::vector<int> peak_buffers;  ///< by chunk: most micro-batches whose activations were held at once
};

/// The bytes that a rank needs to sum the whole gradients of its stage.
struct WholeGradients {
  int64_t kept_bytes = 0;    ///< of weights, masters and two fp32 states of an optimizer, which the rank holds anyway
  int64_t sum_bytes = 0;     ///< of the whole gradients, in the accumulation dtype
  int64_t memory_bytes = 0;  ///< of the rank: its device's, or the host's over the ranks of the model; 0: unknown
  /// Together at most half of the memory: the other half is for activations and messages.
  bool fit() const { return kept_bytes + sum_bytes <= memory_bytes / 2; }
};
/// The figures for `pager`'s layout, where `ranks` ranks share the memory of a host.
WholeGradients whole_gradients_of(const Pager& pager, int ranks);

/// Runs a stage's schedule, over the Training of its parameters. Use it from the thread of that Training.
class StageRunner {
 public:
  /// `training` was made over `grid` and `model.module`, without the parameters of names_of_copies(). Both outlive
  /// this. Collective over the grid's world.
  /// Throws    ConfigError: another number of parts than chunks, a schedule that make_schedule() refuses, a last part
  ///           without a loss.
  StageRunner(Training& training, const Grid& grid, StageModel model, const PipelineOptions& options);
  ~StageRunner();
  StageRunner(const StageRunner&) = delete;
  StageRunner& operator=(const StageRunner&) = delete;

  /// One step over as many micro-batches as the step accumulates. Returns the mean loss over them and all data, []
  /// fp32, the same on every rank, on its device. Collective over the world.
  /// Throws    DataError: the data ended. ShapeError: activations of another shape (PipelineOptions::dynamic_shapes).
  ///           Everything that backward passes and TrainStep::end_window() throw.
  at::Tensor train_batch(const MicroBatches& data);
  /// Forward passes alone, without a graph. Collective over the world.
  EvalResult eval_batch(const MicroBatches& data, const EvalOptions& options = {});

  /// Call it before batches whose activations have other shapes.
  void reset_activation_shape();
  /// Gives copies of tied parameters their owners' values, after a load. Collective over the world.
  void follow_owners();
  /// Sets a schedule of the program's own, as a function of stages and micro-batches. It is checked before it runs.
  void set_schedule(std::function<pipeline::Schedule(int stages, int micro_batches)> make);

  bool is_first_stage() const;
  bool is_last_stage() const;
  int stage() const;
  int stages() const;
  PipelineCounters counters() const;
  /// Whether a step of several micro-batches sums whole gradients, as PipelineConfig::whole_gradients says.
  bool sums_whole_gradients() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

/// Names of the parameters of `model.module` that are copies of what another part owns: InitializeOptions::unmanaged.
/// Throws    ConfigError: there is no module.
std::set<std::string> names_of_copies(const StageModel& model);

}  // namespace trireme
