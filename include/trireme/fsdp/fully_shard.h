// FSDP2's way of training, in C++: an unmodified module, loss.backward(), an optimizer of torch::optim.
//
//   trireme::FullySharded sharded(world, *model, {.units = {"layers[.][0-9]+"}});
//   auto& optimizer = sharded.use<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3));
//   for (auto& batch : loader) {
//     loss_of(*model, batch).backward();
//     sharded.clip_grad_norm_(1.0);
//     optimizer.step();
//     optimizer.zero_grad();
//   }
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "trireme/engine/engine_base.h"

namespace trireme {

/// The arguments of FSDP2's fully_shard().
struct FullyShardPolicy {
  /// Names of modules, as regular expressions of a whole name; the parameters of each are gathered together. Empty: the
  /// library chooses.
  std::vector<std::string> units = {};
  bool reshard_after_forward = true;  ///< false: parameters stay whole, gradients and states are sharded (ZeRO stage 2)
  int shard_ranks = 0;       ///< groups of so many neighbouring ranks shard, and are replicas of each other; 0: all
  bool cpu_offload = false;  ///< shards and states stand in host memory
};

/// A module whose parameters, gradients and optimizer states are shared out over the ranks of a group. Gradients are
/// means over ranks, and add up until the optimizer's step(). Construct, use and destroy on one thread.
///
/// Ensures   weights after each step are those of one process with all ranks' samples, within rounding.
class FullySharded : public EngineBase {
 public:
  /// Collective. Throws, before the module is changed: ConfigError as Engine's, or for a policy that the ranks do not
  /// fit.
  FullySharded(Group& group, torch::nn::Module& module, const FullyShardPolicy& policy = {});
  ~FullySharded() override;

  /// The optimizer that a program steps.
  class Optimizer;
  /// Makes `Kind`, an optimizer of torch::optim, over all trainable parameters; this object owns it. Call it once.
  ///
  /// Throws    StateError: there is one; ConfigError: LBFGS, or one that looks at whole tensors.
  template <class Kind, class Options>
  Optimizer& use(const Options& options) {
    return use<Kind>(all_in_one_group(), options);
  }
  /// The same with parameter groups, which have options of their own or `defaults`, as in torch::optim.
  ///
  /// Throws    ConfigError too: a parameter that is trained is in none of them, or a tensor is no parameter.
  template <class Kind, class Options>
  Optimizer& use(std::vector<torch::optim::OptimizerParamGroup> groups, const Options& defaults) {
    return use(std::move(groups), std::make_unique<Options>(defaults),
               [defaults](const auto& parts) { return std::make_unique<Kind>(parts, defaults); });
  }

  /// Scales the gradients of this window down to a norm of at most `max_norm`; returns the norm before. Collective.
  ///
  /// Throws    StateError: no optimizer, no gradients, or set_requires_gradient_sync(false).
  double clip_grad_norm_(double max_norm);
  /// Whether backward passes reduce gradients. Every rank alike. Throws StateError: no optimizer.
  void set_requires_gradient_sync(bool is_on);
  /// The whole gradient of `parameter` in this window; undefined if no rank has one. Collective.
  at::Tensor full_grad(const at::Tensor& parameter);
  /// A copy of the whole `parameter`. Collective.
  at::Tensor full_tensor(const at::Tensor& parameter);

 private:
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const Groups&)>;

  Groups all_in_one_group() const;
  Optimizer& use(Groups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults, Make make);
  void end_window() { training().step().step(); }

  torch::nn::Module& module_;
  std::unique_ptr<Optimizer> optimizer_;
  bool is_deferring_ = false;
};

/// An optimizer over the module's parameters whose steps run on shards. Schedulers of torch::optim accept it.
class FullySharded::Optimizer final : public torch::optim::Optimizer {
 public:
  /// Ends the window: reduces and applies the gradients that the ranks' backward passes have added up. Collective.
  ///
  /// Throws    StateError: no gradient on any rank since the last step.
  at::Tensor step(LossClosure closure = nullptr) override;
  /// Drops the gradients of this window. Collective. Called through a torch::optim::Optimizer& it does nothing: the
  /// base class sees no gradients.
  void zero_grad() { sharded_.zero_grad(); }

 private:
  friend class FullySharded;
  Optimizer(FullySharded& sharded, const Groups& groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults)
      : torch::optim::Optimizer(groups, std::move(defaults)), sharded_(sharded) {}
  void hand_over_options();

  FullySharded& sharded_;
  torch::optim::Optimizer* on_shards_ = nullptr;
};

}  // namespace trireme
