// The decisions of a step on a device: whether it is applied, the factor of its gradients, and the loss scale
// that follows. All of it stays there, so that the host enqueues the next step before this one has run.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <optional>

#include "trireme/device/stream.h"
#include "trireme/precision/loss_scaler.h"
#include "trireme/precision/step_arithmetic.h"

namespace trireme {

/// The rules of a run.
struct DecisionRules {
  /// A step whose gradients are not finite changes nothing.
  bool skips = true;
  /// Nothing where nothing computes in fp16.
  std::optional<LossScaleOptions> loss_scale = {};
  LossScaleRule rule = LossScaleRule::kHysteresis;

  /// A new LossScaler by these rules; its scale is fixed at 1 where nothing computes in fp16.
  LossScaler scaler() const { return {loss_scale.value_or(LossScaleOptions{.loss_scale = 1}), rule}; }
};

/// Decides over steps on the device.
class DeviceDecider {
 public:
  /// Throws    as check_loss_scale().
  DeviceDecider(c10::Device device, const DecisionRules& rules);

  struct Decision {
    at::Tensor gradient_factor;  ///< [] fp32: unscales and clips; undefined where nothing does
    at::Tensor skip;             ///< [] fp32: 1 where nothing may change, else 0; undefined without `skips`
  };
  /// Decides over a step whose gradients, times the loss scale, have this sum of squares ([] fp64). `max_norm` 0: no
  /// clipping. The host does not wait. Afterwards loss_scale() is that of the next step.
  Decision decide(const at::Tensor& sum_of_squares, double max_norm);

  /// [] fp32: the factor of the next loss; undefined without a loss scale.
  at::Tensor loss_scale() const {
    return loss_scale_.scale.defined() ? loss_scale_.scale.to(at::kFloat) : at::Tensor();
  }
  /// [] int64: steps that were not skipped.
  const at::Tensor& applied_steps() const { return applied_; }

  /// The results of the steps so far, for the host.
  struct Outcome {
    double norm = 0;  ///< before clipping
    bool applied = false;
    int64_t steps = 0;  ///< decided over so far, this one included
    int64_t applied_steps = 0;
    LossScaler::State scaler = {};
    bool at_minimum = false;  ///< an overflow at the smallest loss scale, where that is an error
  };
  /// The results after the last step. The host waits for it.
  Outcome read();
  /// The results after the newest step that the host can know of without waiting; nothing if it has read them already.
  std::optional<Outcome> look();

  /// Goes on from a checkpoint, after `steps` of which `applied_steps` were not skipped.
  void set(int64_t steps, int64_t applied_steps, const LossScaler::State& scaler);

 private:
  /// Numbers on their way to the host.
  struct Report {
    at::Tensor values;  // pinned
    Event arrived;
    int64_t steps = 0;
    bool is_under_way = false;
  };

  at::Tensor present() const;
  void send_report();
  static Outcome outcome_of(const at::Tensor& values, int64_t steps);

  const c10::Device device_;
  const DecisionRules rules_;
  int64_t steps_so_far_ = 0;
  at::Tensor norm_, is_applied_, applied_;
  // In fp64, as step_arithmetic has it: a scale that is infinite in fp32 comes back. Its scale is undefined without
  // one.
  step_arithmetic::LossScaleState<at::Tensor> loss_scale_;
  at::Tensor at_minimum_;          // [] bool
  std::array<Report, 3> reports_;  // the host may be that many steps ahead and still hear of each
  size_t next_report_ = 0;
};

}  // namespace trireme
