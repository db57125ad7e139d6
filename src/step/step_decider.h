// Deciders of a step: whether it is applied, the factor of its gradients, and the loss scale that
// follows.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>

#include "trireme/optim/optimizer.h"
#include "trireme/precision/device_decider.h"
#include "trireme/step/hyperparameters.h"
#include "trireme/step/progress.h"

namespace trireme {

/// The rules by which a StepDecider decides.
struct StepRules {
  DecisionRules decisions = {};
  double max_norm = 0;          ///< of the gradients; 0: no clipping
  bool tells_of_skips = false;  ///< warns of a step that is skipped
};

/// All that a StepDecider carries from step to step.
struct DeciderState {
  int64_t steps = 0;          ///< that were decided over
  int64_t applied_steps = 0;  ///< of these, not skipped
  LossScaler::State scaler = {};
};

/// One of two: the host reads the norm and decides, or the device decides and the host hears of it when it asks.
class StepDecider {
 public:
  virtual ~StepDecider() = default;

  /// How the optimizer takes a step whose gradients, times the loss scale, have this sum of squares ([] fp64); nothing:
  /// the step changes nothing. The result refers to `hyperparameters`.
  virtual std::optional<StepOptions> decide(const at::Tensor& sum_of_squares, Hyperparameters& hyperparameters) = 0;
  /// The step was taken as it was decided: the loss scale follows.
  ///
  /// Throws    StateError: an overflow at the smallest loss scale, under LossScaleRule::kHysteresis. A device may tell
  ///           of it one step late.
  virtual void conclude() = 0;

  /// `output`, in fp32, times the loss scale.
  virtual at::Tensor scaled(const at::Tensor& output) const = 0;

  /// The facts that are known without waiting: whether the last step was applied, and how many were at the least.
  virtual std::optional<bool> applied_if_known() const = 0;
  virtual int64_t known_applied_steps() const = 0;

  // These wait for a device.
  virtual StepOutcome outcome() = 0;
  virtual DeciderState state() = 0;

  /// Goes on from a checkpoint; without a `scaler` the loss scale stays as it is. Throws as LossScaler::set_state().
  virtual void set(int64_t steps, int64_t applied_steps, const std::optional<LossScaler::State>& scaler) = 0;
};

std::unique_ptr<StepDecider> make_host_decider(const StepRules& rules);

/// `takes_decisions`: as ShardedOptimizer's. Where it is false, nothing may be there to decide: no clipping, no
/// skipping, no loss scale.
std::unique_ptr<StepDecider> make_device_decider(c10::Device device, const StepRules& rules, bool takes_decisions);

/// The `skipped`-th step that changed nothing is warned of, ever more rarely.
void warn_of_skipped_step(int64_t step, int64_t skipped);

}  // namespace trireme
