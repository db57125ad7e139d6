// Optimizers over flat shards: fp32 masters and states for just the elements that this rank updates.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "trireme/base/state_tree.h"
#include "trireme/pager/pager.h"

namespace trireme {

enum class OptimizerKind { kAdam, kAdamW, kAdagrad, kLion, kSgd };

/// Names and defaults are DeepSpeed's (and torch.optim's for SGD). Adagrad's own there are lr 1e-2 and eps 1e-10.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double lr = 1e-3;
  double beta1 = 0.9;    ///< Adam, AdamW, Lion
  double beta2 = 0.999;  ///< Adam, AdamW, Lion
  double eps = 1e-8;     ///< Adam, AdamW, Adagrad
  double weight_decay = 0;
  double momentum = 0;  ///< SGD
  bool nesterov = false;
  bool operator==(const OptimizerOptions&) const = default;
};

/// Throws    ConfigError: a hyperparameter out of its range.
void check_optimizer(const OptimizerOptions& options);

/// As the configuration's `type` writes it.
const char* optimizer_name(OptimizerKind kind);
/// The fp32 states of each element, at most two, by the names that they have in checkpoints.
std::vector<std::string> optimizer_states(const OptimizerOptions& options);

/// Hyperparameters of one step.
struct StepOptions {
  double lr = 1e-3;
  double gradient_factor = 1;  ///< gradients are multiplied by this first: clipping
};

/// Updates the slices that `pager` owns. A parameter that got no gradient on any rank is left alone, weight decay
/// included, and its own step count stands still.
class ShardedOptimizer {
 public:
  /// Copies fp32 masters from 16-bit weights. `pager` outlives the optimizer.
  ShardedOptimizer(Pager& pager, const OptimizerOptions& options);
  ~ShardedOptimizer();

  /// Unscale, clip and update every owned slice of the closed window, publishing each unit as soon as it is final.
  void step(const Window& window, const StepOptions& options);

  const OptimizerOptions& options() const;
  /// fp32 masters of the `chosen` parameters follow their 16-bit weights where these were written: an element that is
  /// still its master rounded keeps the master. For a window whose step is skipped, or after only weights were loaded.
  void refresh_masters(const std::vector<bool>& chosen);

  /// Masters ("master.<parameter>") and states ("optimizer.<state>.<parameter>") of this rank's slices. Loading writes
  /// into these tensors; then write_back_masters().
  std::vector<TensorSlice> state();
  std::vector<int64_t> step_counts() const;  ///< by parameter index
  void set_step_counts(const std::vector<int64_t>& counts);
  /// fp32 masters of the `chosen` parameters changed (a load): rounds them into the owned 16-bit weights.
  void write_back_masters(const std::vector<bool>& chosen);

  int64_t master_bytes() const;
  int64_t state_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
