#include "training/tensor_slices.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "training/stage_tensors.h"
#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/comm/parts.h"
#include "trireme/intercept.h"
#include "trireme/pager/init/init.h"

namespace trireme {

namespace {

PartitionModel model_of(const std::vector<StageTensors>& stages, const TrainingOptions& options) {
  PartitionModel model = options.partition_model.value_or(PartitionModel{});
  model.parameters.clear();
  for (const StageTensors& stage : stages)
    for (const ParameterSpec& parameter : stage.tensors) {
      NamedShape& shape = model.parameters.emplace_back(NamedShape{parameter.name, parameter.shape});
      for (const StageTensors& any : stages)
        for (const auto& [other, name] : any.aliases)
          if (name == parameter.name) shape.tied.push_back(other);
    }
  return model;
}

StageTensors tensors_of(const ModuleTensors& tensors, const std::map<std::string, std::string>& copies) {
  StageTensors stage{.tensors = {}, .aliases = tensors.aliases};
  stage.aliases.insert(copies.begin(), copies.end());
  for (const NamedParameter& parameter : tensors.parameters)
    stage.tensors.push_back({parameter.name, parameter.tensor.sizes().vec()});
  return stage;
}

TensorParallelOptions rules_of(TensorParallelOptions rules, const TrainingOptions& options, int ranks) {
  rules.autotp_size = ranks;
  rules.tp_plan = options.tp_plan;
  return rules;
}

/// A line for each parameter.
std::string text_of(const PartitionPlan& plan) {
  std::string text;
  for (const PartitionedParameter& parameter : plan.parameters) {
    text += str("'", parameter.name, "' ", name_of(parameter.kind), parameter.sums_gradient ? ", added up" : "");
    for (const TensorPart& part : parameter.parts) text += str("; ", part.dim < 0 ? "all" : part_text(part));
    text += "\n";
  }
  return text;
}

/// The values of `tensor`'s first rank, contiguous: of what zero::Init has sharded in its own memory, which is whole
/// until another tensor is touched.
at::Tensor first_values(Group& tensor, const at::Tensor& own) {
  zero::gather(own);
  const bool has_memory = tensor.rank() == 0 || zero::is_sharded(own);
  const at::Tensor whole = (has_memory ? own : at::empty_like(own)).contiguous();
  tensor.broadcast(whole, 0).wait();
  return whole;
}

/// Slices of what zero::Init had sharded, sharded again over the ranks that have the same ones; nothing where there are
/// no such parameters.
class ShardedSlices {
 public:
  ShardedSlices(Group& shards, const std::vector<NamedParameter>& parameters) {
    const bool is_needed = std::any_of(parameters.begin(), parameters.end(),
                                       [](const NamedParameter& one) { return zero::is_sharded(one.tensor); });
    if (is_needed && shards.size() > 1) scope_.emplace(shards, zero::InitPolicy{.live_bytes = 0});
  }
  void add(const at::Tensor& slice) {
    if (scope_) scope_->adopt(slice);
  }

 private:
  std::optional<zero::Init> scope_;
};

/// Whether some layer makes logits by it.
bool is_output_head(const PartitionedParameter& planned) {
  const std::vector<std::string> heads = PartitionConfig().lm_head_patterns;
  return std::any_of(planned.uses.begin(), planned.uses.end(), [&](const TensorUse& use) {
    return std::any_of(heads.begin(), heads.end(),
                       [&](const std::string& head) { return use.name.find(head) != std::string::npos; });
  });
}

}  // namespace

PartitionPlan plan_slices(const TrainingGroups& groups, const ModuleTensors& tensors, const Config& config,
                          const TrainingOptions& options) {
  const CallerScope caller("initialize");
  const SubjectScope subject("the tensor_parallel plan");
  const int ranks = groups.slices->size();
  PartitionPlan plan;
  // Rules look at the whole model: at ties, at the order of layers.
  const std::vector<StageTensors> stages = tensors_of_stages(groups.stages, tensors_of(tensors, options.copies));
  all_or_throw(groups.model,
               [&] { plan = make_partition_plan(model_of(stages, options), rules_of(config.tensor, options, ranks)); });
  if (const auto difference = first_different_line(groups.model, [&] { return text_of(plan); }))
    throw ConfigError(str("initialize: the ranks would cut the model differently, first ", difference->text(),
                          "; give every rank the same partition_model and tp_plan"));
  const auto planned = [&](const std::string& name) {
    return *std::find_if(plan.parameters.begin(), plan.parameters.end(),
                         [&](const PartitionedParameter& one) { return one.name == name; });
  };
  std::vector<PartitionedParameter> own;
  for (const NamedParameter& parameter : tensors.parameters) own.push_back(planned(parameter.name));
  for (const auto& [copy, name] : options.copies) own.push_back(planned(name));
  plan.parameters = std::move(own);
  return plan;
}

void set_part(NamedParameter& parameter, const std::vector<TensorPart>& parts, int rank) {
  const TensorPart first = first_held(parts, rank);
  parameter.part = parts[rank];
  parameter.is_counted = local_numel(first) > 0 || local_numel(parts[rank]) == 0;
  if (parameter.is_counted && first != canonical(parts[rank])) parameter.counted = first;
}

void cut_parameters(const TrainingGroups& groups, const PartitionPlan& plan, const PrecisionOptions& precision,
                    std::vector<NamedParameter>& parameters) {
  const at::NoGradGuard no_grad;
  ShardedSlices sharded(groups.sums, parameters);
  const WithoutInterception own_operators;
  const int rank = groups.slices->rank();
  for (size_t i = 0; i < parameters.size(); ++i) {
    NamedParameter& parameter = parameters[i];
    const std::vector<TensorPart>& parts = plan.parameters[i].parts;
    const SubjectScope subject(parameter.name);
    set_part(parameter, parts, rank);
    const bool was_sharded = zero::is_sharded(parameter.tensor);
    at::Tensor slice = cut_part(first_values(*groups.slices, parameter.tensor.detach()), parts[rank]);
    if (was_sharded) slice = slice.to(dtype_of_weight(parameter.tensor, precision));
    if (slice.is_alias_of(parameter.tensor)) continue;
    parameter.tensor.set_data(slice);
    if (was_sharded) sharded.add(slice);
  }
}

std::vector<NamedParameter> cut_copies(int rank, std::span<const PartitionedParameter> plan,
                                       const std::map<std::string, std::string>& names, const torch::nn::Module& module,
                                       const PrecisionOptions& precision) {
  const at::NoGradGuard no_grad;
  const WithoutInterception own_operators;
  const auto parameters = module.named_parameters();
  std::vector<NamedParameter> copies;
  for (const auto& [name, followed] : names) {
    const TensorPart& part = plan[copies.size()].parts[rank];
    NamedParameter& copy = copies.emplace_back(NamedParameter{.name = name, .tensor = parameters[name]});
    const at::Tensor slice = cut_part(copy.tensor.detach(), part).to(dtype_of_weight(copy.tensor, precision));
    copy.tensor.set_data(slice.contiguous());
    copy.part = part;
  }
  return copies;
}

void join_parameters(Group& tensor, const PartitionPlan& plan, const std::vector<NamedParameter>& parameters) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const TensorPart& part = plan.parameters[i].parts[tensor.rank()];
    if (part.dim < 0) continue;
    const SubjectScope subject(parameters[i].name);
    parameters[i].tensor.set_data(join_parts(tensor, plan.parameters[i].parts, parameters[i].tensor.detach()));
  }
}

void add_slices(TensorParallel& pass, const PartitionPlan& plan, const TensorParallelOptions& options,
                const std::vector<NamedParameter>& parameters) {
  if (options.sequence_parallel) pass.shard_tokens();
  if (options.tp_overlap_comm) pass.overlap_sums();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const PartitionedParameter& planned = plan.parameters[i];
    // Logits stay cut: a loss needs three numbers of each token, and what needs them all gathers them.
    const bool gathers = !is_output_head(planned) &&
                         std::any_of(planned.uses.begin(), planned.uses.end(),
                                     [](const TensorUse& use) { return use.output == TensorExchange::kGather; });
    pass.add(parameters[i].tensor, planned.parts, gathers, planned.name);
  }
}

}  // namespace trireme
