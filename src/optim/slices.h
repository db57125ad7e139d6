// The slices that this rank updates: weights and gradients as the pager has them, masters and states in memory beside
// them or on disk.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/disk_states.h"
#include "optim/runs.h"
#include "optim/update.h"
#include "trireme/base/state_tree.h"
#include "trireme/pager/pager.h"

namespace trireme {

/// Leases the owned weights of one unit after the other.
class WeightsInMemory {
 public:
  enum class Use { kRead, kWrite };
  explicit WeightsInMemory(Use use) : use_(use) {}
  ~WeightsInMemory() {
    if (home_ != nullptr) home_->drop();
  }
  WeightsInMemory(const WeightsInMemory&) = delete;
  WeightsInMemory& operator=(const WeightsInMemory&) = delete;

  /// Those of `slice` are there until the next call. Throws as SliceHome::lease().
  void enter(const OwnedSlice& slice);
  void leave();

 private:
  const Use use_;
  SliceHome* home_ = nullptr;
};

class OptimizerSlices {
 public:
  /// fp32 masters of 16-bit weights, unless the update's dtype is theirs; states of zeros, in the masters' dtype.
  /// `pager` outlives it; `groups` and `group_of` are GroupedParameters'. `disk` takes those of slices on the host.
  OptimizerSlices(Pager& pager, const std::vector<OptimizerOptions>& groups, std::vector<int> group_of,
                  const UpdateArithmetic& arithmetic, const DiskSpace& disk);

  size_t count() const { return spans_.size(); }
  DiskUse disk_use() const { return disk_ ? disk_->use() : DiskUse{}; }
  /// The span of slice `i`, as in Pager::owned(), with its gradients. In memory.
  UpdateSpan span(size_t i) const;
  bool has_master(size_t i) const { return has_master_[i]; }

  /// Elements of a slice.
  struct Range {
    size_t slice = 0;
    int64_t begin = 0;
    int64_t end = 0;
  };
  using Access = DiskStates::Access;
  /// Calls `use` with the index of each of `ranges`, which are in order, and its span; where the slice is on disk,
  /// with a span for each block that has elements of the range. Throws as DiskStates::visit().
  void visit(const std::vector<Range>& ranges, Access access,
             const std::function<void(size_t index, const UpdateSpan& span)>& use) const;

  const OwnedSlice& owned(size_t i) const { return pager_.owned()[i]; }
  int unit(size_t i) const { return owned(i).unit; }
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
  bool is_on_disk(size_t i) const { return disk_ && disk_->has(i); }
  /// The number of states of slice `i`: the most that a group with parameters in its unit has.
  size_t states_of(size_t i) const;
  void put_on_disk(const DiskSpace& disk, at::ScalarType dtype);
  UpdateSpan span_of(const DiskStates::BlockPlace& place, const std::vector<at::Tensor>& tensors) const;
  /// The ranges of the `chosen` parameters that have masters.
  std::vector<Range> with_masters(const std::vector<bool>& chosen) const;
  /// `tensor` counts the slice's tensors: the master where there is one, then the states.
  void append(std::vector<TensorSlice>& slices, const std::string& name, size_t i, const ParameterRange& range,
              int tensor) const;

  Pager& pager_;
  const std::vector<int> group_of_;                    ///< by parameter
  std::vector<std::vector<std::string>> state_names_;  ///< by group
  std::vector<UpdateSpan> spans_;                      ///< gradients undefined; of a slice on disk weights alone
  std::vector<bool> has_master_;
  std::unique_ptr<DiskStates> disk_;           ///< null: all is in memory
  std::vector<StochasticRounding> roundings_;  ///< of the slices; empty: to the nearest
  std::vector<bool> is_on_host_;
};

}  // namespace trireme
