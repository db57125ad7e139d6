#include "trireme/fsdp/fully_shard.h"

#include <torch/nn/module.h>

#include <map>
#include <nlohmann/json.hpp>

#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/config/config.h"
#include "trireme/training/gradients.h"

namespace trireme {
namespace {

constexpr double kOfTorch = 1e-6;  // clip_grad_norm_ divides by the norm and this

InitializeOptions options_of(const FullyShardPolicy& policy, int ranks) {
  Json zero = {{"stage", policy.reshard_after_forward ? 3 : 2}};
  if (policy.shard_ranks < 0 || (policy.shard_ranks > 0 && ranks % policy.shard_ranks != 0))
    throw ConfigError(str("FullyShardPolicy::shard_ranks=", policy.shard_ranks, " does not divide the ", ranks,
                          " ranks; choose a divisor, or 0 for all"));
  if (policy.shard_ranks > 0 && policy.shard_ranks < ranks) zero["mics_shard_size"] = policy.shard_ranks;
  if (policy.cpu_offload) {
    zero["offload_optimizer"] = {{"device", "cpu"}};
    if (policy.reshard_after_forward) zero["offload_param"] = {{"device", "cpu"}};
  }
  Json json = {{"zero_optimization", zero},
               {"managed_gradient_accumulation", false},
               {"gradient_clipping", 0.0},
               {"train_micro_batch_size_per_gpu", 1}};
  for (const std::string& unit : policy.units) json["trireme"]["unit_patterns"].push_back(str("^(?:", unit, ")[.]"));
  InitializeOptions options{.config = config_from_json(json, ranks)};
  return options;
}

}  // namespace

FullySharded::FullySharded(Group& group, torch::nn::Module& module, const FullyShardPolicy& policy)
    : EngineBase(group, module, options_of(policy, group.size())), module_(module) {}
FullySharded::~FullySharded() = default;

FullySharded::Groups FullySharded::all_in_one_group() const {
  std::vector<at::Tensor> trained;
  for (const at::Tensor& parameter : module_.parameters())
    if (parameter.requires_grad()) trained.push_back(parameter);
  return {torch::optim::OptimizerParamGroup(std::move(trained))};
}

FullySharded::Optimizer& FullySharded::use(Groups groups, std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                                           Make make) {
  if (optimizer_) throw StateError("use: this module has an optimizer; put all parameters into the groups of one");
  std::map<at::TensorImpl*, size_t> group_of;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (!groups[i].has_options()) groups[i].set_options(defaults->clone());
    for (const at::Tensor& parameter : groups[i].params()) group_of[parameter.unsafeGetTensorImpl()] = i;
  }
  std::map<std::string, size_t> group_by_name;
  for (const auto& item : module_.named_parameters()) {
    const auto found = group_of.find(item.value().unsafeGetTensorImpl());
    if (found != group_of.end()) group_by_name[item.key()] = found->second;
    if (found == group_of.end() && item.value().requires_grad())
      throw ConfigError(str("use: \"", item.key(),
                            "\" is trained and in no group; add it, or freeze it by "
                            "requires_grad_(false) before FullySharded"));
  }
  std::unique_ptr<Optimizer> optimizer(new Optimizer(*this, groups, std::move(defaults)));
  Optimizer* const handle = optimizer.get();
  const auto on_parts = [handle, make = std::move(make), group_by_name](const std::vector<at::Tensor>& parts,
                                                                        const std::vector<std::string>& names) {
    std::vector<std::vector<at::Tensor>> of_group(handle->param_groups().size());
    for (size_t i = 0; i < parts.size(); ++i) of_group[group_by_name.at(names[i])].push_back(parts[i]);
    Groups shards;
    for (size_t i = 0; i < of_group.size(); ++i)
      shards.emplace_back(std::move(of_group[i]), handle->param_groups()[i].options().clone());
    auto made = make(shards);
    handle->on_shards_ = made.get();
    return made;
  };
  training().set_optimizer({.client = on_parts});
  optimizer_ = std::move(optimizer);
  return *optimizer_;
}

at::Tensor FullySharded::Optimizer::step(LossClosure closure) {
  at::Tensor loss;
  if (closure) {
    const at::AutoGradMode with_gradients(true);
    loss = closure();
  }
  hand_over_options();
  sharded_.end_window();
  return loss;
}

/// Programs and schedulers change the options of this one's groups.
void FullySharded::Optimizer::hand_over_options() {
  for (size_t i = 0; i < param_groups().size(); ++i) {
    const auto& options = param_groups()[i].options();
    on_shards_->param_groups()[i].set_options(options.clone());
    sharded_.set_lr(options.get_lr(), i);
  }
}

double FullySharded::clip_grad_norm_(double max_norm) {
  require_optimizer("clip_grad_norm_");
  const double norm = norm_of_gradients(training());
  const double factor = max_norm / (norm + kOfTorch);
  if (factor < 1) scale_gradients(training(), factor);
  return norm;
}

void FullySharded::set_requires_gradient_sync(bool is_on) {
  require_optimizer("set_requires_gradient_sync");
  if (is_deferring_ == !is_on) return;
  training().step().defer(is_on ? nullptr : "set_requires_gradient_sync(false)");
  is_deferring_ = !is_on;
}

at::Tensor FullySharded::full_grad(const at::Tensor& parameter) {
  return safe_get_full_grad(parameter).value_or(at::Tensor());
}

at::Tensor FullySharded::full_tensor(const at::Tensor& parameter) { return whole_weight(parameter); }

}  // namespace trireme
