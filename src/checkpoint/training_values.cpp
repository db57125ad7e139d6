#include "trireme/checkpoint/training_values.h"

#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/state_names.h"
#include "trireme/base/utf8.h"

namespace trireme {
namespace {

template <class T>
void put(Json& json, const char* key, const std::optional<T>& value) {
  if (value) json[key] = *value;
}

/// Takes `key` out of `json`.
template <class T>
std::optional<T> take(Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end()) return std::nullopt;
  std::optional<T> value = found->template get<T>();
  json.erase(found);
  return value;
}

LossScalerValues scaler_from(const Json& json) {
  return {.scale = json.at("scale").get<double>(),
          .steps = json.at("steps").get<int64_t>(),
          .last_overflow = json.at("last_overflow").get<int64_t>(),
          .hysteresis = json.at("hysteresis").get<int64_t>()};
}

std::vector<GroupValues> groups_from(const std::vector<Json>& json) {
  std::vector<GroupValues> groups;
  for (Json group : json) {
    GroupValues values{.options = {},
                       .names = take<std::vector<std::string>>(group, "names").value_or(std::vector<std::string>())};
    values.options = group.dump();
    groups.push_back(std::move(values));
  }
  return groups;
}

TrainingValues shared_from(Json json) {
  TrainingValues values;
  values.global_steps = take<int64_t>(json, "global_steps");
  values.micro_steps = take<int64_t>(json, "micro_steps");
  values.skipped_steps = take<int64_t>(json, "skipped_steps");
  values.global_samples = take<int64_t>(json, "global_samples");
  values.lr = take<double>(json, "lr");
  values.group_lrs = take<std::vector<double>>(json, "group_lrs").value_or(std::vector<double>());
  values.micro_batch_seed = take<uint64_t>(json, "micro_batch_seed");
  if (const auto scaler = take<Json>(json, "loss_scaler")) values.loss_scaler = scaler_from(*scaler);
  values.aliases = take<std::map<std::string, std::string>>(json, "aliases").value_or(values.aliases);
  values.exclude_frozen_parameters = take<bool>(json, "exclude_frozen_parameters");
  if (const auto steps = take<Json>(json, "parameter_steps"))
    for (const auto& [name, count] : steps->items()) values.set_steps(name, count.get<int64_t>());
  values.groups = groups_from(take<std::vector<Json>>(json, "parameter_groups").value_or(std::vector<Json>()));
  if (const auto config = take<Json>(json, "config")) values.config = config->dump();
  if (const auto client = take<Json>(json, "client_state")) values.client_state = client->dump();
  values.others = json.dump();
  return values;
}

ParameterValues parameter_from(Json json) {
  return {.steps = take<int64_t>(json, "steps"),
          .group = take<int>(json, "group").value_or(-1),
          .position = take<int>(json, "position").value_or(0),
          .aliases = take<std::vector<std::string>>(json, "aliases").value_or(std::vector<std::string>())};
}

void add_parameters(TrainingValues& values, const std::vector<std::pair<std::string, std::string>>& tensor_values) {
  std::vector<std::map<int, std::vector<std::string>>> members(values.groups.size());  // by position
  for (const auto& [tensor, text] : tensor_values) {
    const StateName name = parse_state_name(tensor);
    if (name.kind != StateKind::kWeight) continue;
    const std::string parameter(name.parameter);
    const ParameterValues known = parameter_from(parse_own_json(text));
    if (known.steps) values.set_steps(parameter, *known.steps);
    for (const std::string& alias : known.aliases) values.aliases[alias] = parameter;
    if (known.group >= static_cast<int>(members.size()))
      throw CheckpointError(str("checkpoint: \"", parameter, "\" is of parameter group ", known.group,
                                ", expected one of ", members.size()));
    if (known.group >= 0) members[known.group][known.position].push_back(parameter);
  }
  for (size_t group = 0; group < members.size(); ++group)
    for (const auto& [position, names] : members[group])
      values.groups[group].names.insert(values.groups[group].names.end(), names.begin(), names.end());
}

}  // namespace

void TrainingValues::set_steps(const std::string& parameter, int64_t count) {
  if (steps.insert_or_assign(parameter, count).second) parameters.push_back(parameter);
}

std::string to_text(const ParameterValues& values) {
  Json json = Json::object();
  put(json, "steps", values.steps);
  if (values.group >= 0) json.update({{"group", values.group}, {"position", values.position}});
  if (!values.aliases.empty()) json["aliases"] = values.aliases;
  return json.empty() ? "" : json.dump();
}

std::string to_text(const TrainingValues& values) {
  Json json = Json::object();
  put(json, "global_steps", values.global_steps);
  put(json, "micro_steps", values.micro_steps);
  put(json, "skipped_steps", values.skipped_steps);
  put(json, "global_samples", values.global_samples);
  put(json, "lr", values.lr);
  if (!values.group_lrs.empty()) json["group_lrs"] = values.group_lrs;
  put(json, "micro_batch_seed", values.micro_batch_seed);
  if (const auto& scaler = values.loss_scaler)
    json["loss_scaler"] = {{"scale", scaler->scale},
                           {"steps", scaler->steps},
                           {"last_overflow", scaler->last_overflow},
                           {"hysteresis", scaler->hysteresis}};
  if (!values.aliases.empty()) json["aliases"] = values.aliases;
  put(json, "exclude_frozen_parameters", values.exclude_frozen_parameters);
  // Each name once: Json itself would search linearly.
  Json steps = Json::object();
  for (const std::string& name : values.parameters)
    steps.get_ref<Json::object_t&>().emplace_back(name, values.steps.at(name));
  if (!values.parameters.empty()) json["parameter_steps"] = std::move(steps);
  for (const GroupValues& group : values.groups) {
    Json& options = json["parameter_groups"].emplace_back(parse_own_json(group.options));
    if (!group.names.empty()) options["names"] = group.names;
  }
  if (values.config) json["config"] = parse_own_json(*values.config);
  if (values.client_state) json["client_state"] = parse_own_json(*values.client_state);
  json.update(parse_own_json(values.others));
  return json.dump();
}

TrainingValues parse_training_values(const std::string& text,
                                     const std::vector<std::pair<std::string, std::string>>& tensor_values) {
  try {
    Json json = parse_plain_json(text);
    if (json.is_discarded()) throw CheckpointError(str("checkpoint: its values are not JSON: ", excerpt(text)));
    TrainingValues values = shared_from(json.is_object() ? std::move(json) : Json::object());
    add_parameters(values, tensor_values);
    return values;
  } catch (const Json::exception& error) {
    throw CheckpointError(str("checkpoint: a value is of the wrong kind: ", error.what()));
  }
}

TrainingValues training_values(const Manifest& manifest) {
  std::vector<std::pair<std::string, std::string>> tensor_values;
  for (const SavedTensor& tensor : manifest.tensors)
    if (!tensor.values.empty()) tensor_values.emplace_back(tensor.name, tensor.values);
  return parse_training_values(manifest.values, tensor_values);
}

}  // namespace trireme
