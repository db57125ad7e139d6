// Where training stands between two steps.
#pragma once

#include <cstdint>
#include <optional>

#include "trireme/precision/loss_scaler.h"

namespace trireme {

/// Counters, the same on every rank; a load sets them to those of the checkpoint.
struct TrainingProgress {
  int64_t micro_steps = 0;    ///< calls of step() that did not throw
  int64_t global_steps = 0;   ///< of these, at the end of an accumulation window; skipped ones included
  int64_t skipped_steps = 0;  ///< of these, without an update because a gradient was not finite
  /// The train_batch_size of every global step, summed; without managed_gradient_accumulation the micro-batch of every
  /// backward pass that came, times the ranks.
  int64_t global_samples = 0;
};

/// All that the host knows of a step() when it returns, without waiting for a device.
struct StepReport {
  bool ended_window = false;         ///< the step updated or skipped; false: inside an accumulation window
  std::optional<bool> applied = {};  ///< the weights changed; nothing: a device has not told yet
};

/// How the last step ended.
struct StepOutcome {
  std::optional<double> norm = {};  ///< before clipping; -1 if not finite; nothing before the first step
  bool applied = false;             ///< the weights changed
};

/// All that a checkpoint holds of a TrainStep beside the hyperparameters of its parameter groups.
struct TrainStepState {
  TrainingProgress progress = {};
  std::optional<LossScaler::State> loss_scaler = {};  ///< where something computes in fp16
  std::optional<uint64_t> micro_batch_seed = {};      ///< in deterministic mode
};

}  // namespace trireme
