// The state that training keeps for one parameter, whole or this rank's part of it: fp32 value, optimizer states,
// gradient.
//
// The functions find the engine by the parameter alone. Names are DeepSpeed's. "Full" tensors have the shape of the
// model's parameter, also under tensor parallelism, where this rank has only a slice of it. "Local" tensors are [n]:
// the n elements (0 or more) of this rank's flattened parameter that this rank updates. All values are fp32 copies. The
// functions work at every ZeRO stage; at ZeRO stage 0 every rank updates, and so holds, everything.
//
// All are collective, except those that say Local, safe_get_local_optimizer_state, safe_set_local_optimizer_state and
// safe_set_full_optimizer_state. Arguments are the same on every rank, except the values of local setters; where layers
// are cut, ranks that have the same elements give these the same values.
//
// A frozen parameter has no master, states or gradient: getters return nothing for it, so that a loop over all
// parameters of a model needs no condition.
//
// Throws    StateError: the tensor is no parameter of a living engine; a value or state where there is no optimizer; a
//           frozen parameter is written; a gradient without a backward since the last step(), or, but for
//           safe_get_full_grad, inside of no_sync() or coalesce_grad_reduction(). ConfigError: an optimizer state that
//           this parameter does not have, with those that it has. ShapeError: a value of another shape. Nothing has
//           changed then.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/optim/optimizer.h"
#include "trireme/pager/pager.h"

namespace trireme {

/// The fp32 master, or the weights of an fp32 parameter. Includes what users wrote into the weight.
std::optional<at::Tensor> safe_get_full_fp32_param(const at::Tensor& parameter);
/// The weight itself, in its own dtype. Works for a frozen parameter and without an optimizer, too.
at::Tensor whole_weight(const at::Tensor& parameter);
/// A state by the name that it has in checkpoints, such as "exp_avg".
std::optional<at::Tensor> safe_get_full_optimizer_state(const at::Tensor& parameter, const std::string& state);
/// The names of the states that the library's own update keeps of a parameter, the same on every rank; none with a
/// client's optimizer. Local.
std::vector<std::string> optimizer_state_names(const at::Tensor& parameter);
/// How often a parameter was updated; 0 for a frozen one. Local, but waits for a device.
int64_t step_count(const at::Tensor& parameter);
/// Sets the update counts of `parameters`, which are of one engine and not frozen: bias correction goes on from these.
/// Local.
void set_step_counts(const std::vector<at::Tensor>& parameters, const std::vector<int64_t>& counts);
/// The mean over ranks and micro-batches so far, without a loss scale, before clipping; nothing for a parameter that no
/// rank used. Inside of no_sync() and coalesce_grad_reduction(), where nothing is reduced: this rank's sum since the
/// last reduction, already divided by the accumulation steps; collective then only over the ranks that share layers.
std::optional<at::Tensor> safe_get_full_grad(const at::Tensor& parameter);

/// The 16-bit weight becomes `value` rounded.
void safe_set_full_fp32_param(const at::Tensor& parameter, const at::Tensor& value);
void safe_set_full_optimizer_state(const at::Tensor& parameter, const at::Tensor& value, const std::string& state);
/// Replaces the gradient that step() will use; later backward passes add to it. Throws StateError too for a parameter
/// that no rank used.
void safe_set_full_grad(const at::Tensor& parameter, const at::Tensor& value);

/// The same for the elements that this rank updates, [n].
std::optional<at::Tensor> safe_get_local_fp32_param(const at::Tensor& parameter);
std::optional<at::Tensor> safe_get_local_optimizer_state(const at::Tensor& parameter, const std::string& state);
std::optional<at::Tensor> safe_get_local_grad(const at::Tensor& parameter);
void safe_set_local_fp32_param(const at::Tensor& parameter, const at::Tensor& value);
void safe_set_local_optimizer_state(const at::Tensor& parameter, const at::Tensor& value, const std::string& state);
void safe_set_local_grad(const at::Tensor& parameter, const at::Tensor& value);

/// Full gradient (fp32) and parameter (this rank's slice, where layers are cut) -> the full gradient to take instead.
using GradientUpdate = std::function<at::Tensor(const at::Tensor& gradient, const at::Tensor& parameter)>;
/// safe_set_full_grad(p, update(safe_get_full_grad(p), p)) for each of `parameters`, with the reductions done once;
/// those that are frozen or that no rank used are left out. `update` gives the same on every rank.
void safe_update_full_grad_vectorized(const std::vector<at::Tensor>& parameters, const GradientUpdate& update);

/// The ranks that have slices of the same layers, and which slices.
struct CutLayers {
  Group* ranks = nullptr;                           ///< null: each rank has all of every layer
  std::vector<std::vector<TensorPart>> parts = {};  ///< by parameter of the pager, then by rank
};

/// The part of an engine that the functions above call. A `parameter` is an index into the pager's parameters.
class ParameterAccess final : public PagerCompanion {
 public:
  /// `loss_scale` returns the factor of the loss now; empty: 1.
  ///
  /// Requires  all outlive this; `optimizer` may be null.
  ParameterAccess(Pager& pager, ShardedOptimizer* optimizer, std::function<double()> loss_scale = {},
                  CutLayers layers = {});
  ~ParameterAccess() override;
  ParameterAccess(const ParameterAccess&) = delete;
  ParameterAccess& operator=(const ParameterAccess&) = delete;

  /// This rank's elements [begin, begin + data.numel()) of a parameter's flattening; empty data where it has none.
  struct Part {
    int64_t begin = 0;
    at::Tensor data;
    SliceStore* store = nullptr;  ///< of which `data` is a copy; null: `data` itself is the engine's

    /// Changes the engine's elements. Throws IoError.
    void write(const at::Tensor& values) const;
  };

  Part value(int parameter) const;
  /// A copy of the weight, in the shape of the model's parameter. Collective.
  at::Tensor weight(int parameter) const;
  Part state(int parameter, const std::string& state) const;
  /// As ShardedOptimizer has them.
  const std::vector<std::string>& state_names(int parameter) const { return optimizer_->state_names(parameter); }
  std::vector<int64_t> step_counts() const { return optimizer_->step_counts(); }
  void set_step_counts(const std::vector<int64_t>& counts) { optimizer_->set_step_counts(counts); }
  /// As the pager holds it: times loss_scale().
  Part gradient(int parameter) const;
  double loss_scale() const { return loss_scale_ ? loss_scale_() : 1; }
  /// Assembles every rank's part of this rank's parameter, as fp32 [numel]. Collective.
  at::Tensor gather(int parameter, const Part& part) const;
  /// Makes the model's parameter, in its shape, of the ranks' slices; this rank's is `own` [numel]. Collective where
  /// layers are cut.
  at::Tensor join(int parameter, const at::Tensor& own) const;
  /// The elements of `full`, in the shape of the model's parameter, that this rank's slice has: [numel].
  at::Tensor cut(int parameter, const at::Tensor& full) const;
  /// The shape of join()'s result.
  std::vector<int64_t> whole_shape(int parameter) const;
  /// Whether `condition` holds on any of the ranks that share layers. Collective where layers are cut.
  bool on_any_slice(bool condition) const;
  /// Writes `full`, fp32 in the shape of the model's parameter, into the master and, rounded, into `weight`.
  /// Collective.
  void set_value(int parameter, const at::Tensor& weight, const at::Tensor& full);
  /// Takes users' writes into weights over into shards and masters. Collective.
  void settle();

  Pager& pager() const { return pager_; }
  const ParameterSpec& spec(int parameter) const { return pager_.parameters()[parameter]; }
  bool has_optimizer() const { return optimizer_ != nullptr; }

 private:
  Part part_of(int parameter, at::Tensor OwnedSlice::*flat) const;
  /// Whether there is one; its data, where a store has them, are read.
  std::optional<Part> find_state(int parameter, const std::string& state) const;

  Pager& pager_;
  ShardedOptimizer* optimizer_;
  std::function<double()> loss_scale_;
  CutLayers layers_;
  std::vector<std::map<std::string, Part>> states_;  ///< by parameter: "master" and optimizer states
};

}  // namespace trireme
