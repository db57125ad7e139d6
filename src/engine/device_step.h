// An optimizer step whose decisions stay on the device: norm, skipping, loss scale, and the learning rate that follows
// from how many steps were applied.
#pragma once

#include <optional>
#include <vector>

#include "trireme/optim/optimizer.h"
#include "trireme/optim/schedule.h"
#include "trireme/precision/device_decider.h"

namespace trireme {

class DeviceStep {
 public:
  /// `schedule` outlives it.
  DeviceStep(c10::Device device, const DecisionRules& rules, const Schedule& schedule);

  /// Whether steps can be skipped, so that only the device knows how many were applied.
  bool skips() const { return skips_; }
  DeviceDecider& decider() { return decider_; }

  /// `attempts`: steps so far, skipped ones included. Numbers of `groups` count, but for the learning rates where only
  /// the device knows them.
  void run(ShardedOptimizer& optimizer, const Window& window, const std::vector<OptimizerOptions>& groups,
           double max_norm, int64_t attempts);
  /// The next run() goes by the learning rates of its groups, which a user has set.
  void take_given_rates() { takes_given_rates_ = true; }
  /// Goes on from a checkpoint.
  void set(int64_t steps, int64_t applied_steps, const LossScaler::State& scaler);

 private:
  std::vector<at::Tensor> rates(size_t groups, int64_t attempts);

  const c10::Device device_;
  const bool skips_;
  DeviceDecider decider_;
  const Schedule& schedule_;
  bool takes_given_rates_ = false;
  at::Tensor table_;  // [groups, applied steps from first_ on] fp32
  int64_t first_ = 0;
};

}  // namespace trireme
