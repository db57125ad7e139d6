#include "trireme/optim/options.h"

#include <algorithm>
#include <unordered_set>

#include "trireme/base/error.h"
#include "trireme/base/name_pattern.h"
#include "trireme/optim/fields.h"

namespace trireme {

const char* optimizer_name(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdam:
      return "Adam";
    case OptimizerKind::kAdamW:
      return "AdamW";
    case OptimizerKind::kAdagrad:
      return "Adagrad";
    case OptimizerKind::kLamb:
      return "Lamb";
    case OptimizerKind::kLion:
      return "Lion";
    case OptimizerKind::kMuon:
      return "Muon";
    case OptimizerKind::kSgd:
      return "SGD";
    case OptimizerKind::kClient:
      return "client";
  }
  return "";
}

std::vector<std::string> optimizer_states(const OptimizerOptions& options) {
  switch (options.kind) {
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
    case OptimizerKind::kLamb:
      return {"exp_avg", "exp_avg_sq"};
    case OptimizerKind::kAdagrad:
      return {"sum"};
    case OptimizerKind::kLion:
      return {"exp_avg"};
    case OptimizerKind::kMuon:
      return {"momentum_buffer"};
    case OptimizerKind::kClient:
      return {};
    case OptimizerKind::kSgd:
      if (options.momentum != 0) return {"momentum_buffer"};
      return {};
  }
  return {};
}

void check_update_dtype(OptimizerKind kind, at::ScalarType update_dtype) {
  const bool has_only_fp32 =
      kind == OptimizerKind::kLamb || kind == OptimizerKind::kLion || kind == OptimizerKind::kMuon;
  if (update_dtype == at::kFloat || !has_only_fp32) return;
  throw ConfigError(
      str("optimizer.type: ", optimizer_name(kind),
          " updates fp32 masters, which bf16.bf16_master_weights_and_grads does without; set that key and "
          "bf16.bf16_optimizer_states to false, or use Adam, AdamW, Adagrad or SGD"),
      ErrorCode::kUnsupported);
}

void check_optimizer(const OptimizerOptions& options) {
  const auto refuse = [](const std::string& name, auto value, const char* fix) {
    throw ConfigError(str("optimizer.params.", name, "=", value, ": ", fix));
  };
  fields([&](const Field& field, auto own, auto) {
    const auto value = static_cast<double>(options.*own);
    const bool has_it = field.is_of(options.kind) || (field.muons_adam && options.kind == OptimizerKind::kMuon);
    if (!has_it || (value >= field.least && value <= field.most)) return;
    refuse(field.place < 0 ? field.name : str(field.name, "[", field.place, "]"), options.*own, field.fix);
  });
  if (options.kind == OptimizerKind::kSgd && options.nesterov && options.momentum == 0)
    refuse("momentum", 0, "nesterov needs a momentum above 0");
  if (options.kind == OptimizerKind::kLamb && !(options.max_coeff >= options.min_coeff))
    refuse("max_coeff", options.max_coeff, "use min_coeff or more");
  if (options.kind == OptimizerKind::kMuon && !(options.adam_lr.value_or(0) >= 0))
    refuse("adam_lr", *options.adam_lr, "use 0 or more");
}

Momentum momentum_of(const OptimizerOptions& options) {
  if (options.kind == OptimizerKind::kSgd || options.kind == OptimizerKind::kMuon) return {options.momentum, 0};
  if (options.kind == OptimizerKind::kAdagrad || options.kind == OptimizerKind::kClient) return {0, 0};
  return {options.beta1, options.beta2};
}

void set_momentum(OptimizerOptions& options, const Momentum& momentum) {
  if (options.momentum != 0) options.momentum = momentum.first;
  options.beta1 = momentum.first;
  options.beta2 = momentum.second;
}

namespace {

OptimizerOptions with_overrides(OptimizerOptions options, const ParameterGroup& group) {
  if (group.lr) options.adam_lr.reset();
  group_fields([&](const Field&, auto own, auto of_group) { options.*own = (group.*of_group).value_or(options.*own); });
  return options;
}

void check_group(const OptimizerOptions& options, size_t group) {
  try {
    check_optimizer(options);
  } catch (const ConfigError& error) {
    throw ConfigError(str("parameter_groups[", group, "]: ", error.what()));
  }
}

bool matches(const std::vector<NamePattern>& patterns, const std::string& name) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const NamePattern& pattern) { return pattern.is_in(name); });
}

bool is_for_muon(const ParameterSpec& parameter) {
  const auto has = [&](const char* part) { return parameter.name.find(part) != std::string::npos; };
  return parameter.shape.size() == 2 && !has("embed") && !has("lm_head") && !has("wte") && !has("wpe");
}

void split_for_muon(GroupedParameters& grouped, const std::vector<ParameterSpec>& parameters) {
  const size_t count = grouped.options.size();
  for (size_t i = 0; i < parameters.size(); ++i)
    if (!is_for_muon(parameters[i])) grouped.group_of[i] += static_cast<int>(count);
  for (size_t group = 0; group < count; ++group) {
    OptimizerOptions adam = grouped.options[group];
    adam.kind = OptimizerKind::kAdamW;
    adam.lr = adam.adam_lr.value_or(adam.lr);
    grouped.options.push_back(adam);
  }
}

}  // namespace

GroupedParameters group_parameters(const OptimizerOptions& options, const std::vector<ParameterGroup>& groups,
                                   const std::vector<ParameterSpec>& parameters) {
  check_optimizer(options);
  GroupedParameters grouped{.options = {options}, .group_of = std::vector<int>(parameters.size(), 0)};
  for (size_t group = 0; group < groups.size(); ++group) {
    std::vector<NamePattern> patterns;
    for (const std::string& pattern : groups[group].patterns)
      patterns.emplace_back(pattern, str("parameter_groups[", group, "].patterns"));
    const std::unordered_set<std::string> names(groups[group].names.begin(), groups[group].names.end());
    bool any = false;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const std::string& name = parameters[i].name;
      if (grouped.group_of[i] != 0 || !(names.contains(name) || matches(patterns, name))) continue;
      grouped.group_of[i] = static_cast<int>(group) + 1;
      any = true;
    }
    if (!any)
      throw ConfigError(
          str("parameter_groups[", group,
              "]: no parameter is left that its patterns match or its names name; correct them, or remove the group"));
    grouped.options.push_back(with_overrides(options, groups[group]));
    check_group(grouped.options.back(), group);
  }
  if (options.kind == OptimizerKind::kMuon) split_for_muon(grouped, parameters);
  return grouped;
}

}  // namespace trireme
