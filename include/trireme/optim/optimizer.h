// Optimizers over flat shards: masters and states for just the elements that this rank updates.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/state_tree.h"
#include "trireme/optim/options.h"
#include "trireme/pager/pager.h"

namespace trireme {

/// The decision over a step as tensors on the parameters' device, so that the host need not know it.
struct StepDecision {
  at::Tensor gradient_factor = {};  ///< [] fp32; undefined: 1
  at::Tensor skip = {};             ///< [] fp32: 1 where nothing may change, else 0; undefined: never
  std::vector<at::Tensor> lr = {};  ///< by group, [] fp32; empty: as the groups say
};

/// The numbers with which one step is taken.
struct StepOptions {
  /// Hyperparameters of this step, by group.
  const std::vector<OptimizerOptions>& groups;
  double gradient_factor = 1;                 ///< gradients are multiplied by this first: clipping over the loss scale
  std::optional<StepDecision> decision = {};  ///< in place of the numbers above; only if takes_decisions()
};

/// Updates the slices that `pager` owns. A parameter that got no gradient on any rank is left alone, weight decay
/// included, and its own step count stands still.
class ShardedOptimizer {
 public:
  /// Copies fp32 masters from 16-bit weights. If the update's dtype is that of the weights there are no masters:
  /// weights are updated in place and states have their dtype. `pager` and its `group` outlive the optimizer.
  /// Throws    ConfigError: Lamb, or stochastic rounding, for parameters on a device; Lamb, Lion or Muon in bf16.
  ///           IoError: the disk has no space, or cannot be written to.
  ShardedOptimizer(Pager& pager, Group& group, GroupedParameters parameters, const UpdateArithmetic& arithmetic = {},
                   const DiskSpace& disk = {});
  /// Steps the optimizer that `factory` makes over this rank's parts of parameters. Throws ConfigError: it cannot be
  /// stepped.
  ShardedOptimizer(Pager& pager, Group& group, const ClientOptimizerFactory& factory,
                   const UpdateArithmetic& arithmetic = {});
  ~ShardedOptimizer();

  /// Unscales, clips and updates every owned slice of `window`, after its begin_update(), and publishes each unit as
  /// soon as it is final. Collective with Lamb and Muon, which need whole parameters.
  void step(ClosedWindow& window, const StepOptions& options);

  /// Whether step() takes a StepDecision: on a device, except with Muon and a client's optimizer, which need numbers on
  /// the host.
  bool takes_decisions() const;

  /// The parameter groups of a client's optimizer, of which only the learning rate is known.
  std::vector<OptimizerOptions> client_groups() const;
  /// Sets fp32 masters of the `chosen` parameters to the 16-bit weights where users wrote these: an element that still
  /// equals its rounded master keeps the master. For a window whose step is skipped, or after only weights were loaded.
  void refresh_masters(const std::vector<bool>& chosen);

  /// Masters ("master.<parameter>") and states ("optimizer.<state>.<parameter>") of this rank's slices. Loading writes
  /// into these tensors; then match_masters() and set_step_counts(). Throws CheckpointError: a client's optimizer
  /// has a state that is not of the shard's shape.
  std::vector<TensorSlice> state();
  /// state() without that of a client's optimizer.
  std::vector<TensorSlice> own_state() const;
  /// The names of a parameter's states, the same on every rank; none with a client's optimizer.
  const std::vector<std::string>& state_names(int parameter) const;
  /// The parameter's index in StepOptions::groups; -1 with a client's optimizer.
  int group_of(int parameter) const;
  std::vector<int64_t> step_counts() const;  ///< by parameter index; waits for a device
  void set_step_counts(const std::vector<int64_t>& counts);
  /// To call after a load that filled state() except the tensors in `missing`, or (`with_states` false) only weights:
  /// a weight becomes its master, rounded, if the master was loaded; else the master becomes the weight.
  void match_masters(bool with_states, const std::vector<std::string>& missing);

  DiskUse disk_use() const;  ///< by masters and states
  int64_t master_bytes() const;
  int64_t state_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
