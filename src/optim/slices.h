// The slices that this rank updates: weights, masters and states, where the pager has them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "optim/runs.h"
#include "optim/update.h"
#include "trireme/base/state_tree.h"
#include "trireme/pager/pager.h"

namespace trireme {

class OptimizerSlices {
 public:
  /// fp32 masters of 16-bit weights, unless the update's dtype is theirs; states of zeros, in the masters' dtype.
  /// `pager` outlives it; `groups` and `group_of` are GroupedParameters'.
  OptimizerSlices(Pager& pager, const std::vector<OptimizerOptions>& groups, std::vector<int> group_of,
                  const UpdateArithmetic& arithmetic);

  size_t count() const { return spans_.size(); }
  /// The span of slice `i`, as in Pager::owned(), with its gradients.
  UpdateSpan span(size_t i) const;
  int unit(size_t i) const { return pager_.owned()[i].unit; }
  bool is_on_host(size_t i) const { return is_on_host_[i]; }
  bool any_on_host() const { return any(true); }
  bool any_on_device() const { return any(false); }

  int group_of(int parameter) const { return group_of_[parameter]; }
  const std::vector<std::string>& state_names(int parameter) const { return state_names_[group_of_[parameter]]; }
  std::vector<Run> runs(size_t i, const std::vector<bool>& touched, const std::vector<int64_t>& steps) const;
  std::vector<ParameterRange> ranges(size_t i) const;

  /// Weights of slice `i` become its masters, rounded.
  static void round_weights(const UpdateSpan& span);
  /// ShardedOptimizer::refresh_masters().
  void refresh_masters(const std::vector<bool>& chosen) const;
  /// Weights of the `chosen` parameters become their masters, rounded.
  void write_back_masters(const std::vector<bool>& chosen) const;

  /// ShardedOptimizer::own_state().
  std::vector<TensorSlice> state() const;
  int64_t master_bytes() const;
  int64_t state_bytes() const;

 private:
  bool any(bool on_host) const;
  void append(std::vector<TensorSlice>& slices, const std::string& name, const ParameterRange& range,
              const at::Tensor& flat) const;

  Pager& pager_;
  const std::vector<int> group_of_;                    ///< by parameter
  std::vector<std::vector<std::string>> state_names_;  ///< by group
  std::vector<UpdateSpan> spans_;                      ///< gradients undefined
  std::vector<StochasticRounding> roundings_;          ///< of the slices; empty: to the nearest
  std::vector<bool> is_on_host_;
};

}  // namespace trireme
