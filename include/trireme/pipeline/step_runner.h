// Runs a step function over stages that own parts of an unmodified model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/grid.h"
#include "trireme/ownership/ownership.h"
#include "trireme/training/training.h"

namespace trireme {

/// Options of a StepRunner.
struct StepRunnerOptions {
  /// In which order a stage runs the passes of a step: "interleaved" (1F1B), "simple" (all forward passes, then all
  /// backward passes), "sequential" (one micro-batch after the other, as a program's first step in any case). Where a
  /// program comes back to a stage after another one, forward passes take turns on a stage, or run as "sequential"
  /// where they cannot; rank 0 says so once.
  std::string pipeline = "interleaved";
  /// The most micro-batches that are open at once on a stage under "interleaved"; 0: the stages and two more.
  int active_micro_batches = 0;
};

/// A step function is any program over the model: it calls backward() with its loss and returns tensors. Each stage
/// runs all of it for each micro-batch; what a stage has parameters for is computed there.
///
/// Several Trainings may take part, each of a model of its own: a step function may use all of them, gradients go to
/// each, and each has a window of its own.
///
/// Every method is collective over the grid's world. After an error that came out of a step nothing but the end of the
/// Trainings is left: other stages wait for what does not come.
class StepRunner {
 public:
  /// `ownership` is over the axis "pipe" of `grid`. Both outlive this.
  /// Throws    ConfigError: an option that there is not.
  StepRunner(const Grid& grid, Ownership& ownership, const StepRunnerOptions& options);
  ~StepRunner();
  StepRunner(const StepRunner&) = delete;
  StepRunner& operator=(const StepRunner&) = delete;

  /// Steps are `training`'s, too, from now on until leave(): one that was made over the same grid and this stage's
  /// parts of a model, whose parts were owned. `check` is called before each step.
  /// Throws    ConfigError: there is another one, and they compute in fp16, shard gradients or weights, offload, are
  ///           deterministic or cut layers.
  void join(Training& training, std::function<void()> check);
  void leave(const Training& training) noexcept;

  /// The results of the function, for each micro-batch: detached, with its numbers on every stage.
  using Outputs = std::vector<std::vector<at::Tensor>>;
  using Program = std::function<std::vector<at::Tensor>(int micro_batch)>;
  /// One step: forward passes, and backward passes where the program called backward(). Gradients are added up until
  /// end_window().
  ///
  /// Throws    ConfigError: stages differ in the number of micro-batches; what `program` throws. CommError: another
  ///           stage failed, or ran another program (kDiverged names both operators).
  /// `name`: steps of one name are alike. How stages follow each other comes from the last one.
  Outputs run(int micro_batches, const Program& program, const std::string& name = "");
  /// Whether this thread's micro-batch is only run to its end, by errors, as the step has failed.
  static bool is_given_up() noexcept;
  /// A program that was interrupted (WaitHook) where micro-batches take turns, and does not end within a second, is
  /// left in its thread: run() throws, and what it has in use must stay for ever. The program calls stay_if_left() as
  /// soon as it goes on.
  bool has_left() const;
  static void stay_if_left();
  /// Inside of a program: backward begins from `root` when the micro-batch's forward pass has ended.
  void backward(const at::Tensor& root, const at::Tensor& gradient = {});
  /// The step of this one's optimizer over what has been added up.
  /// Throws    StateError, after which the engine goes on: no backward pass since the last one, or ranks ran another
  ///           number of them.
  void end_window(const Training& training);

  /// The schedule that the last step ran by.
  const std::string& pipeline() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
