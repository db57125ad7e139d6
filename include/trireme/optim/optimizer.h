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

/// The decision over a step without the host: numbers of the parameters' device.
struct StepDecision {
  at::Tensor gradient_factor = {};  ///< [] fp32; undefined: 1
  at::Tensor skip = {};             ///< [] fp32: 1 where nothing may change, else 0; undefined: never
  std::vector<at::Tensor> lr = {};  ///< by group, [] fp32; empty: as the groups say
};

/// The numbers with which one step is taken.
struct StepOptions {
  /// In force now, by group: schedules change lr and momentum.
  const std::vector<OptimizerOptions>& groups;
  double gradient_factor = 1;                 ///< gradients are multiplied by this first: clipping
  std::optional<StepDecision> decision = {};  ///< in place of the numbers above; where takes_decisions()
};

/// Updates the slices that `pager` owns. A parameter that got no gradient on any rank is left alone, weight decay
/// included, and its own step count stands still.
class ShardedOptimizer {
 public:
  /// Copies fp32 masters from 16-bit weights; where the update's dtype is the weights', these are updated themselves,
  /// and states have their dtype. `pager` and its `group` outlive the optimizer; `parameters` are its own.
  /// Throws ConfigError: Lamb, whose loops are the host's, for parameters on a device, and stochastic rounding there;
  ///        Lamb, Lion
  /// and Muon in bf16.
  ShardedOptimizer(Pager& pager, Group& group, GroupedParameters parameters, const UpdateArithmetic& arithmetic = {});
  /// Steps what `factory` makes of this rank's parts of parameters. Throws ConfigError: it cannot be stepped.
  ShardedOptimizer(Pager& pager, Group& group, const ClientOptimizerFactory& factory,
                   const UpdateArithmetic& arithmetic = {});
  ~ShardedOptimizer();

  /// Unscales, clips and updates every owned slice of `window`, after its begin_update(), and publishes each unit as
  /// soon as it is final.
  /// Collective with Lamb and Muon, which need whole parameters.
  void step(ClosedWindow& window, const StepOptions& options);

  /// Whether step() can go by a StepDecision: on a device, but for Muon and a client's optimizer, which want numbers.
  bool takes_decisions() const;

  /// The parameter groups of a client's optimizer, of which only the learning rate is known.
  std::vector<OptimizerOptions> client_groups() const;
  /// fp32 masters of the `chosen` parameters follow their 16-bit weights where these were written: an element that is
  /// still its master rounded keeps the master. For a window whose step is skipped, or after only weights were loaded.
  void refresh_masters(const std::vector<bool>& chosen);

  /// Masters ("master.<parameter>") and states ("optimizer.<state>.<parameter>") of this rank's slices. Loading writes
  /// into these tensors; then match_masters() and set_step_counts(). Throws CheckpointError: a client's optimizer
  /// has a state that is not of the shard's shape.
  std::vector<TensorSlice> state();
  /// state() without that of a client's optimizer.
  std::vector<TensorSlice> own_state() const;
  /// The states of a parameter, the same on every rank; none of a client's optimizer, whose states are its own.
  const std::vector<std::string>& state_names(int parameter) const;
  /// The parameter's index in StepOptions::groups; -1 with a client's optimizer.
  int group_of(int parameter) const;
  std::vector<int64_t> step_counts() const;  ///< by parameter index; waits for a device
  void set_step_counts(const std::vector<int64_t>& counts);
  /// After a load that filled state() except for the tensors named in `missing`, or (`with_states` false) filled
  /// weights alone: a weight becomes its master rounded where that was loaded, else the master follows its weight.
  void match_masters(bool with_states, const std::vector<std::string>& missing);

  int64_t master_bytes() const;
  int64_t state_bytes() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
