// The optimizer states in the file of one rank.
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "checkpoint/layouts/deepspeed/parts.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/formats/pickle/json.h"

namespace trireme::deepspeed {

using pickle::Kind;
using pickle::Value;

namespace {

/// A tensor that must be fp32.
Piece piece_of(pickle::TorchArchive& archive, int file, const Value& tensor, const std::string& what) {
  const int64_t offset = archive.offset_of(tensor, what);
  if (tensor.place->dtype != at::kFloat) {
    throw CheckpointError(str(archive.path().string(), ": ", what, " is ", tensor.place->dtype,
                              ", expected Float: masters and optimizer states in 16 bits are not supported"));
  }
  return {file, offset, tensor.place->numel()};
}

std::vector<std::vector<int64_t>> paddings_of(const Value& state, const std::string& where) {
  std::vector<std::vector<int64_t>> paddings;
  const Value* by_group = state.find("param_alignment_paddings");
  if (!by_group || !by_group->is(Kind::kList)) return paddings;
  for (const Value* group : by_group->items)
    paddings.push_back(numbers_of(*group, where + ": param_alignment_paddings"));
  return paddings;
}

/// States, group by group: a state_dict of torch, or with zero_optimization.elastic_checkpoint a list.
void read_base_optimizer(pickle::TorchArchive& archive, const Value& state, const std::string& where, RankPart& part) {
  const Value* base = state.find("base_optimizer_state");
  if (!base) base = state.find("optimizer_state_dict");
  if (base && base->is(Kind::kList)) {
    for (size_t group = 0; group < part.groups.size() && group < base->items.size(); ++group) {
      read_states(archive, *base->items[group], str(where, ": base_optimizer_state[", group, "]"), part.groups[group]);
      part.members.push_back({static_cast<int64_t>(group)});
      part.group_options.push_back(Json::object());
    }
    const Value* step = state.find("base_optimizer_state_step");
    for (FlatGroup& group : part.groups)
      if (step && step->is(Kind::kInt)) group.step = step->integer;
    return;
  }
  if (!base) throw CheckpointError(where + ": there is no base_optimizer_state");
  read_param_groups(*base, where, part);
  // A state's number counts through the groups' parameters, the members say which flat tensor that is.
  const Value& groups = required(*base, "param_groups", Kind::kList, where);
  int64_t next = 0;
  for (size_t i = 0; i < groups.items.size(); ++i)
    for (int64_t& member : part.members[i]) {
      if (next >= static_cast<int64_t>(part.groups.size()))
        throw CheckpointError(
            str(where, ": more parameters in param_groups than the ", part.groups.size(), " flat tensors"));
      if (const Value* one = state_at(*base, member))
        read_states(archive, *one, str(where, ": state[", member, "]"), part.groups[next]);
      if (const Value* step = groups.items[i]->find("step"); step && step->is(Kind::kInt))
        part.groups[next].step = step->integer;
      member = next++;
    }
}

}  // namespace

const Value& required(const Value& dict, const char* key, Kind kind, const std::string& where) {
  const Value* found = dict.find(key);
  if (!found) throw CheckpointError(str(where, ": expected '", key, "', found none: no checkpoint of DeepSpeed's"));
  if (!found->is(kind))
    throw CheckpointError(str(where, ": '", key, "' is ", kind_name(found->kind), ", expected ", kind_name(kind)));
  return *found;
}

std::vector<int64_t> numbers_of(const Value& list, const std::string& where) {
  std::vector<int64_t> numbers;
  const bool is_list = list.is(Kind::kList) || list.is(Kind::kTuple);
  for (const Value* item : list.items) {
    if (!is_list || !item->is(Kind::kInt) || item->integer < 0) break;
    numbers.push_back(item->integer);
  }
  if (!is_list || numbers.size() != list.items.size())
    throw CheckpointError(where + ": expected a list of numbers of at least 0");
  return numbers;
}

const Value* state_at(const Value& optimizer, int64_t index) {
  const Value* states = optimizer.find("state");
  if (!states || !states->is(Kind::kDict)) return nullptr;
  for (size_t i = 0; i < states->items.size(); i += 2)
    if (states->items[i]->is(Kind::kInt) && states->items[i]->integer == index) return states->items[i + 1];
  return nullptr;
}

void read_param_groups(const Value& optimizer, const std::string& where, RankPart& part) {
  for (const Value* group : required(optimizer, "param_groups", Kind::kList, where).items) {
    part.members.push_back(
        numbers_of(required(*group, "params", Kind::kList, where + ": param_groups"), where + ": params"));
    Json options = Json::object();
    for (size_t i = 0; i < group->items.size(); i += 2) {
      const auto json = pickle::to_json(*group->items[i + 1]);
      if (group->items[i]->is(Kind::kString) && group->items[i]->text != "params" && json)
        options[group->items[i]->text] = *json;
    }
    part.group_options.push_back(std::move(options));
  }
}

void read_states(pickle::TorchArchive& archive, const Value& state, const std::string& where, FlatGroup& group) {
  if (!state.is(Kind::kDict)) throw CheckpointError(str(where, " is ", kind_name(state.kind), ", expected a dict"));
  for (size_t i = 0; i < state.items.size(); i += 2) {
    const Value& key = *state.items[i];
    const Value& value = *state.items[i + 1];
    if (!key.is(Kind::kString)) continue;
    const std::string what = where.substr(where.find(": ") + 2) + "." + key.text;
    const bool one = value.is(Kind::kTensor) && value.place->shape.empty();
    if (key.text == "step") {
      group.step = value.is(Kind::kInt) ? value.integer : static_cast<int64_t>(archive.item(value, what));
    } else if (value.is(Kind::kTensor) && !one) {
      group.states[key.text] = piece_of(archive, group.weights.file, value, what);
    } else {
      log(LogLevel::kWarning,
          str(archive.path().string(), ": ", what, " belongs to no single element; it is left out"));
    }
  }
}

std::optional<LossScalerValues> loss_scaler_values(const Value* scaler) {
  const Value* scale = scaler ? scaler->attribute("cur_scale") : nullptr;
  if (!scale || !(scale->is(Kind::kFloat) || scale->is(Kind::kInt))) return std::nullopt;
  const auto count = [&](const char* name, int64_t otherwise) {
    const Value* found = scaler->attribute(name);
    return found && found->is(Kind::kInt) ? found->integer : otherwise;
  };
  return LossScalerValues{.scale = scale->is(Kind::kFloat) ? scale->real : static_cast<double>(scale->integer),
                          .steps = count("cur_iter", 0),
                          .last_overflow = count("last_overflow_iter", -1),
                          .hysteresis = count("cur_hysteresis", 1)};
}

/// An enum's member is pickled as a call of its class on its value, by Python 3.11.0 to 3.11.3 as getattr(class, name).
std::optional<int> stage_of(const Value& stage) {
  if (stage.is(Kind::kInt)) return static_cast<int>(stage.integer);
  if (!stage.is(Kind::kObject) || stage.items.empty()) return std::nullopt;
  const Value& last = *stage.items.back();
  if (last.is(Kind::kInt)) return static_cast<int>(last.integer);
  constexpr std::array<std::string_view, 4> kNames = {"disabled", "optimizer_states", "gradients", "weights"};
  const auto* const found = std::find(kNames.begin(), kNames.end(), last.text);
  if (!last.is(Kind::kString) || found == kNames.end()) return std::nullopt;
  return static_cast<int>(found - kNames.begin());
}

RankPart read_rank(pickle::TorchArchive& archive, int file) {
  const std::string where = archive.path().string() + ": optimizer_state_dict";
  const Value& state = required(archive.root(), "optimizer_state_dict", Kind::kDict, archive.path().string());
  RankPart part;
  part.stage = state.find("fp32_flat_groups") ? 3 : 2;
  if (const Value* stage = state.find("zero_stage")) part.stage = stage_of(*stage).value_or(part.stage);
  const char* key = part.stage == 3 ? "fp32_flat_groups" : "single_partition_of_fp32_groups";
  for (const Value* weights : required(state, key, Kind::kList, where).items)
    part.groups.push_back(
        {.weights = piece_of(archive, file, *weights, str(key, "[", part.groups.size(), "]")), .states = {}});
  part.paddings = paddings_of(state, where);
  read_base_optimizer(archive, state, where, part);
  part.loss_scaler = loss_scaler_values(state.find("loss_scaler"));
  return part;
}

}  // namespace trireme::deepspeed
