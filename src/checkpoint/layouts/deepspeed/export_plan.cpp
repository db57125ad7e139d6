#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/layouts/deepspeed/export.h"
#include "trireme/base/error.h"
#include "trireme/base/state_names.h"
#include "trireme/checkpoint/reshard.h"

namespace trireme::deepspeed {
namespace {

class Planner {
 public:
  Planner(const CheckpointSource& source, const DeepSpeedLayout& layout) : source_(source) {
    if (layout.stage < 1 || layout.stage > 3)
      throw ConfigError(
          str("stage ", layout.stage, ": DeepSpeed's ZeRO stages with files of their own are 1, 2 and 3"));
    if (layout.ranks < 1) throw ConfigError(str("ranks ", layout.ranks, ": expected at least 1"));
    plan_.stage = layout.stage;
    plan_.ranks = layout.ranks;
    plan_.values = training_values(source.manifest);
    plan_.config = Json::parse(plan_.values.config.value_or("{}"));
    if (!plan_.config.is_object()) plan_.config = Json::object();
  }

  ExportPlan run() {
    sort_tensors();
    plan_groups();
    plan_module();
    for (size_t group = 0; group < plan_.groups.size(); ++group) cut_into_flat(group);
    count_bytes();
    return std::move(plan_);
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw CheckpointError(str(source_.folder.string(), ": ", what));
  }

  void sort_tensors() {
    for (size_t i = 0; i < source_.manifest.tensors.size(); ++i) {
      const StateName name = parse_state_name(source_.manifest.tensors[i].name);
      const std::string parameter(name.parameter);
      switch (name.kind) {
        case StateKind::kWeight:
          model_[parameter] = i;
          in_order_.push_back(parameter);
          break;
        case StateKind::kMaster:
          masters_[parameter] = i;
          break;
        case StateKind::kOptimizerState:
          states_[parameter][std::string(name.state)] = i;
          break;
        case StateKind::kOther:
          fail(str("tensor \"", source_.manifest.tensors[i].name, "\" is neither of the model nor of its optimizer"));
      }
    }
    if (states_.empty())
      fail("it holds no optimizer states, and DeepSpeed loads no checkpoint without; convert it to another layout");
    for (const auto& [state, tensor] : states_.begin()->second) plan_.states.push_back(state);
    const TrainingValues& values = plan_.values;
    const std::pair<const char*, bool> required[] = {{"global_steps", values.global_steps.has_value()},
                                                     {"skipped_steps", values.skipped_steps.has_value()},
                                                     {"global_samples", values.global_samples.has_value()},
                                                     {"parameter_steps", !values.steps.empty()}};
    for (const auto& [key, is_there] : required)
      if (!is_there) fail(str("expected the value '", key, "', found none; it was not saved by an engine"));
  }

  ExportedParameter parameter_of(const std::string& name) const {
    const auto model = model_.find(name);
    const auto states = states_.find(name);
    if (model == model_.end() || states == states_.end())
      fail(str("\"", name, "\" belongs to a parameter group, but it has no ",
               model == model_.end() ? "weights" : "states"));
    const SavedTensor& tensor = source_.manifest.tensors[model->second];
    const auto master = masters_.find(name);
    ExportedParameter parameter{name,
                                tensor.shape,
                                checked_numel(tensor.shape, name),
                                model->second,
                                master == masters_.end() ? model->second : master->second,
                                states->second};
    if (source_.manifest.tensors[parameter.weights].dtype != at::kFloat)
      fail(str("\"", name, "\" is ", tensor.dtype,
               " and has no fp32 master, which DeepSpeed's files must have; write the weights alone by `trireme "
               "consolidate`, convert it to another layout, or save it by a run with masters (bf16 without "
               "bf16_optimizer_states)"));
    for (const std::string& state : plan_.states)
      if (!parameter.states.contains(state) || parameter.states.size() != plan_.states.size())
        fail(str("\"", name, "\" has other optimizer states than \"", states_.begin()->first, "\""));
    return parameter;
  }

  void plan_groups() {
    std::vector<GroupValues> groups = plan_.values.groups;
    if (groups.empty()) {
      if (plan_.values.group_lrs.size() > 1)
        fail("it was saved with several parameter groups, but does not say which parameter is in which; save it again");
      GroupValues& all = groups.emplace_back();
      std::copy_if(plan_.values.parameters.begin(), plan_.values.parameters.end(), std::back_inserter(all.names),
                   [&](const std::string& name) { return states_.contains(name); });
    }
    size_t count = 0;
    for (size_t i = 0; i < groups.size(); ++i) {
      if (groups[i].names.empty()) continue;
      ExportedGroup& group = plan_.groups.emplace_back();
      for (const std::string& name : groups[i].names) {
        group.parameters.push_back(parameter_of(name));
        const auto steps = plan_.values.steps.find(name);
        if (steps == plan_.values.steps.end())
          fail(str("\"", name, "\" belongs to a parameter group, but has no steps"));
        group.step = std::max(group.step, steps->second);
      }
      count += group.parameters.size();
      group.options = options_of(Json::parse(groups[i].options), i);
    }
    if (count != states_.size())
      fail(str("its parameter groups name ", count, " parameters, ", states_.size(), " have optimizer states"));
  }

  /// The options of a group, as torch's optimizers keep them: the configuration's hyperparameters, then what the
  /// checkpoint says of the group itself.
  Json options_of(const Json& described, size_t group) const {
    Json options = {{"lr", plan_.values.lr.value_or(1e-3)},
                    {"betas", {0.9, 0.999}},
                    {"eps", 1e-8},
                    {"weight_decay", 0.0},
                    {"bias_correction", true},
                    {"amsgrad", false},
                    {"maximize", false},
                    {"foreach", nullptr},
                    {"capturable", false},
                    {"differentiable", false},
                    {"fused", nullptr},
                    {"decoupled_weight_decay", true}};
    const Json& config = plan_.config;
    if (config.contains("optimizer") && config["optimizer"].is_object()) {
      const Json params = config["optimizer"].value("params", Json::object());
      for (const auto& [key, value] : params.items())
        if (!value.is_string() && !value.is_null()) options[key] = value;
      options["decoupled_weight_decay"] =
          config["optimizer"].value("type", "AdamW") == "AdamW" || options.value("adam_w_mode", true);
      for (const char* key : {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}) options.erase(key);
    }
    const std::vector<double>& rates = plan_.values.group_lrs;
    if (group < rates.size()) options["lr"] = rates[group];
    for (const auto& [key, value] : described.items())
      if (key != "lr" || rates.empty()) options[key] = value;
    return options;
  }

  void plan_module() {
    std::set<std::string> parameters;
    for (const std::string& name : plan_.values.parameters) {
      const auto found = model_.find(name);
      if (found == model_.end()) continue;  // saved without frozen parameters
      parameters.insert(name);
      plan_.module.emplace_back(name, found->second);
      if (!states_.contains(name)) plan_.frozen.emplace_back(name, found->second);
      plan_.is_bf16 = plan_.is_bf16 || source_.manifest.tensors[found->second].dtype == at::kBFloat16;
    }
    for (const std::string& name : in_order_) {
      if (parameters.contains(name)) continue;
      plan_.buffers.push_back(name);
      plan_.module.emplace_back(name, model_.at(name));
    }
  }

  /// ZeRO stage 3 steps sub-groups of a group one after the other: as many parameters as reach sub_group_size on a
  /// rank.
  void cut_into_flat(size_t group) {
    double limit = 1e9;
    const Json zero = plan_.config.value("zero_optimization", Json::object());
    const auto found = zero.find("sub_group_size");
    if (zero.is_object() && found != zero.end() && found->is_number()) limit = found->get<double>();
    const auto part = [&](const ExportedParameter& parameter) {
      return static_cast<double>((parameter.numel + plan_.ranks - 1) / plan_.ranks);
    };
    double whole = 0;
    for (const ExportedParameter& parameter : plan_.groups[group].parameters) whole += part(parameter);
    double filled = limit;
    for (const ExportedParameter& parameter : plan_.groups[group].parameters) {
      const bool first = &parameter == &plan_.groups[group].parameters.front();
      if (first || (plan_.stage == 3 && limit < whole && filled >= limit)) {
        plan_.flat.push_back({group, {}});
        filled = 0;
      }
      plan_.flat.back().parameters.push_back(&parameter);
      filled += part(parameter);
    }
  }

  void count_bytes() {
    const auto bytes = [&](size_t tensor) {
      const SavedTensor& saved = source_.manifest.tensors[tensor];
      return checked_numel(saved.shape, saved.name) * static_cast<int64_t>(c10::elementSize(saved.dtype));
    };
    for (const ExportedGroup& group : plan_.groups)
      for (const ExportedParameter& parameter : group.parameters)
        plan_.tensor_bytes += bytes(parameter.weights) * static_cast<int64_t>(1 + plan_.states.size());
    if (plan_.stage >= 2)
      for (const auto& [name, tensor] : plan_.frozen) plan_.tensor_bytes += bytes(tensor);
    if (plan_.stage == 3) {
      for (const std::string& name : plan_.buffers) plan_.tensor_bytes += bytes(model_.at(name)) * plan_.ranks;
    } else {
      for (const auto& [name, tensor] : plan_.module) plan_.tensor_bytes += bytes(tensor);
    }
  }

  const CheckpointSource& source_;
  ExportPlan plan_;
  std::map<std::string, size_t> model_;
  std::map<std::string, size_t> masters_;
  std::map<std::string, std::map<std::string, size_t>> states_;  ///< by parameter, then by state
  std::vector<std::string> in_order_;                            ///< of the model
};

}  // namespace

ExportPlan plan_export(const CheckpointSource& source, const DeepSpeedLayout& layout) {
  try {
    return Planner(source, layout).run();
  } catch (const Json::exception& error) {
    throw CheckpointError(str(source.folder.string(), ": a value is of the wrong kind: ", error.what()));
  }
}

std::vector<PaddedRange> part_of_rank(const ExportPlan& plan, const FlatParameters& flat, int rank,
                                      const std::string& state) {
  const auto tensor_of = [&](const ExportedParameter& parameter) {
    return state.empty() ? parameter.weights : parameter.states.at(state);
  };
  std::vector<PaddedRange> ranges;
  if (plan.stage == 3) {
    for (const ExportedParameter* parameter : flat.parameters) {
      const int64_t part = (parameter->numel + plan.ranks - 1) / plan.ranks;
      const int64_t numel = std::clamp<int64_t>(parameter->numel - rank * part, 0, part);
      ranges.push_back({tensor_of(*parameter), std::min(rank * part, parameter->numel), numel, part - numel});
    }
    return ranges;
  }
  int64_t total = 0;
  for (const ExportedParameter* parameter : flat.parameters) total += parameter->numel;
  const int64_t part = (total + 2 * plan.ranks - 1) / (2 * plan.ranks) * 2;
  const int64_t begin = rank * part;
  int64_t parameter_begin = 0;
  for (const ExportedParameter* parameter : flat.parameters) {
    const int64_t first = std::max(begin, parameter_begin);
    const int64_t last = std::min(begin + part, parameter_begin + parameter->numel);
    if (first < last) ranges.push_back({tensor_of(*parameter), first - parameter_begin, last - first, 0});
    parameter_begin += parameter->numel;
  }
  const int64_t padding = part - std::clamp<int64_t>(total - begin, 0, part);
  if (!state.empty() && padding > 0) ranges.push_back({0, 0, 0, padding});
  return ranges;
}

}  // namespace trireme::deepspeed
