#include "training/optimizer_choice.h"

#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/comm/agreement.h"
#include "trireme/optim/client_trial.h"
#include "trireme/parallel/exclusions.h"

namespace trireme {

namespace {

/// Elements of which ranks have copies under other names or at other places would be rounded otherwise on each.
void check_rounding(const OptimizerChoice& choice, const ParallelPlan& plan) {
  const auto refuse = [](const auto&... why) {
    throw ConfigError(str("trireme.stochastic_rounding: ", why...), ErrorCode::kUnsupported);
  };
  if (choice.client) refuse("a client_optimizer rounds by itself; remove the key, or use Adam, AdamW, Adagrad or SGD");
  if (plan.slices.size() > 1)
    refuse("with tensor_parallel (autotp_size=", plan.slices.size(), ") it is not there yet; remove one of the two");
  if (plan.stages.size() > 1)
    refuse("with a pipeline (stages=", plan.stages.size(), ") it is not there yet; remove one of the two");
}

void check_on_disk(Feature optimizer, const char* name, const DiskSpace& states, const DiskSpace& weights) {
  if (!states.is_on() && !weights.is_on()) return;
  const Exclusion& row = exclusion_of(states.is_on() ? Feature::kStatesOnDisk : Feature::kWeightsOnDisk, optimizer);
  throw ConfigError(filled(row.text, {name}), row.code);
}

/// For an optimizer that looks at whole parameters.
void check_whole(const char* optimizer, const ParallelPlan& plan) {
  for (const PlannedAxis& axis : plan.axes) {
    if (axis.size == 1 || !axis.part->feature) continue;
    if (const Exclusion* const row = find_exclusion(*axis.part->feature, Feature::kMatrixOptimizer))
      throw ConfigError(filled(row->text, {optimizer, str(axis.size)}), row->code);
  }
}

}  // namespace

void check(const OptimizerChoice& choice, const ParallelPlan& plan, const PrecisionOptions& precision,
           const DiskSpace& disk, const DiskSpace& weights) {
  if (precision.stochastic_rounding) check_rounding(choice, plan);
  if (choice.optimizer) {
    check_optimizer(*choice.optimizer);
    const OptimizerKind kind = choice.optimizer->kind;
    check_update_dtype(kind, precision.update_dtype);
    if (kind == OptimizerKind::kLamb || kind == OptimizerKind::kMuon)
      check_on_disk(Feature::kMatrixOptimizer, optimizer_name(kind), disk, weights);
    if (kind == OptimizerKind::kLamb || kind == OptimizerKind::kMuon) check_whole(optimizer_name(kind), plan);
  }
  if (!choice.client) return;
  check_on_disk(Feature::kClientOptimizer, "an optimizer of the program", disk, weights);
  if (choice.optimizer)
    throw ConfigError(str("client_optimizer: the configuration has the optimizer ",
                          optimizer_name(choice.optimizer->kind), " too; remove one of the two"));
  if (!choice.parameter_groups.empty())
    throw ConfigError(filled(exclusion_of(Feature::kParameterGroups, Feature::kClientOptimizer).text,
                             {str(choice.parameter_groups.size())}));
}

PreparedOptimizer prepare(const OptimizerChoice& choice, const WholeModel& model, size_t count) {
  PreparedOptimizer prepared{.client = choice.client, .schedule = choice.schedule};
  bool has_trainable = false;
  for (const ParameterSpec& parameter : model.parameters) has_trainable = has_trainable || parameter.trainable;
  if (!choice.is_empty() && !has_trainable)
    throw ConfigError(
        "optimizer: the module has no parameter that requires a gradient; unfreeze one, or leave the optimizer out");
  if (choice.optimizer) {
    prepared.grouped = group_parameters(*choice.optimizer, choice.parameter_groups, model.parameters);
    const auto first = prepared.grouped.group_of.begin() + static_cast<ptrdiff_t>(model.first);
    prepared.grouped.group_of = std::vector<int>(first, first + static_cast<ptrdiff_t>(count));
  }
  (void)hyperparameters_of(prepared, nullptr);  // throws where the schedule does not fit
  return prepared;
}

void try_client(Group& group, const OptimizerChoice& choice, const std::vector<ParameterSpec>& parameters,
                c10::Device device) {
  if (choice.client) together(group, [&] { try_client_optimizer(choice.client, parameters, device); });
}

std::unique_ptr<ShardedOptimizer> make_optimizer(PreparedOptimizer& prepared, Pager& pager, Group& group,
                                                 const PrecisionOptions& precision, const DiskSpace& disk) {
  const UpdateArithmetic arithmetic{precision.update_dtype, precision.stochastic_rounding};
  if (prepared.client) return std::make_unique<ShardedOptimizer>(pager, group, prepared.client, arithmetic);
  std::unique_ptr<ShardedOptimizer> made;
  const auto make = [&] {
    made = std::make_unique<ShardedOptimizer>(pager, group, prepared.grouped, arithmetic, disk);
  };
  disk.is_on() ? together(group, make) : make();  // a disk may be full on one rank alone
  return made;
}

Hyperparameters hyperparameters_of(const PreparedOptimizer& prepared, const ShardedOptimizer* optimizer) {
  if (optimizer != nullptr && prepared.client) return Hyperparameters(optimizer->client_groups(), prepared.schedule);
  return Hyperparameters(prepared.grouped.options, prepared.schedule);
}

}  // namespace trireme
