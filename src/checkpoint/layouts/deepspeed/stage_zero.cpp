// Stage 0: torch's own optimizer states, by the number of a parameter. Which parameter that is the file does not say.
#include <algorithm>
#include <nlohmann/json.hpp>

#include "checkpoint/layouts/deepspeed/parts.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme::deepspeed {

using pickle::Kind;
using pickle::Value;

namespace {

using Shape = std::vector<int64_t>;

/// The shape of the parameter that each number stands for; empty: unknown.
struct Numbered {
  std::vector<std::vector<Shape>> shapes;          ///< by parameter group
  std::vector<std::vector<const Value*>> masters;  ///< of the same, nullptr: the weight itself
};

Numbered numbered_of(const Value& optimizer, const Value* masters, const RankPart& part) {
  Numbered numbered;
  for (size_t group = 0; group < part.members.size(); ++group) {
    auto& shapes = numbered.shapes.emplace_back();
    auto& weights = numbered.masters.emplace_back();
    for (size_t i = 0; i < part.members[group].size(); ++i) {
      const Value* master = masters ? masters->items.at(group)->items.at(i) : nullptr;
      const Value* shaped = master;
      const Value* state = state_at(optimizer, part.members[group][i]);
      for (size_t k = 1; !shaped && state && k < state->items.size(); k += 2)
        if (state->items[k]->is(Kind::kTensor) && state->items[k - 1]->text != "step") shaped = state->items[k];
      if (!shaped || !shaped->is(Kind::kTensor)) return {};
      shapes.push_back(shaped->place->shape);
      weights.push_back(master);
    }
  }
  return numbered;
}

/// Names for the numbered shapes, by group; nothing: the shapes leave a choice. An optimizer is given parameters in the
/// model's order, possibly in several groups, possibly without frozen ones.
std::optional<std::vector<std::vector<std::string>>> names_for(const std::vector<std::vector<Shape>>& shapes,
                                                               const ModelPart& model) {
  std::map<Shape, int64_t> numbered;
  std::map<Shape, int64_t> present;
  for (const auto& group : shapes)
    for (const Shape& shape : group) ++numbered[shape];
  for (const std::string& name : model.names) ++present[model.module.at(name)->place->shape];
  for (const auto& [shape, count] : numbered)
    if (present[shape] != count) return std::nullopt;  // one of them is frozen: which?
  std::vector<std::vector<std::string>> names(shapes.size());
  for (const std::string& name : model.names) {
    const Shape& shape = model.module.at(name)->place->shape;
    if (!numbered.contains(shape)) continue;
    int candidates = 0;
    size_t chosen = 0;
    for (size_t group = 0; group < shapes.size(); ++group) {
      const size_t next = names[group].size();
      // A group whose next parameter has another shape may still get this one only if the order is another.
      if (next >= shapes[group].size() || shapes[group][next] != shape) continue;
      ++candidates;
      chosen = group;
    }
    if (candidates != 1) return std::nullopt;
    names[chosen].push_back(name);
  }
  return names;
}

void leave_out(const pickle::TorchArchive& archive) {
  log(LogLevel::kWarning, str(archive.path().string(),
                              ": the optimizer states are left out: ZeRO stage 0 numbers them, and their shapes do not "
                              "tell the names; save "
                              "from a run with ZeRO stage 1 to keep them"));
}

}  // namespace

TrainedPart read_stage_zero(pickle::TorchArchive& archive, int file, const ModelPart& model) {
  TrainedPart result;
  const std::string where = archive.path().string() + ": optimizer";
  const Value* optimizer = archive.root().find("optimizer");
  if (!optimizer || !optimizer->is(Kind::kDict)) return result;
  const Value* masters = optimizer->find("fp32_groups");
  const bool is_wrapped = optimizer->find("optimizer_state_dict") != nullptr;
  const Value& base = is_wrapped ? required(*optimizer, "optimizer_state_dict", Kind::kDict, where) : *optimizer;
  if (is_wrapped && !masters) return leave_out(archive), result;  // one flat tensor per group, without shapes
  RankPart part;
  read_param_groups(base, where, part);
  const bool masters_fit = !masters || (masters->is(Kind::kList) && masters->items.size() == part.members.size());
  for (size_t group = 0; masters && masters_fit && group < part.members.size(); ++group)
    if (masters->items[group]->items.size() != part.members[group].size())
      throw CheckpointError(str(where, ": fp32_groups[", group, "] has other parameters than param_groups"));
  if (!masters_fit) throw CheckpointError(where + ": fp32_groups does not fit param_groups");

  const Numbered numbered = numbered_of(base, masters, part);
  const auto names = numbered.shapes.empty() ? std::nullopt : names_for(numbered.shapes, model);
  if (!names) {
    leave_out(archive);
    for (auto& members : part.members) members.clear();  // the learning rates are known all the same
    result.part = std::move(part);
    return result;
  }
  for (size_t group = 0; group < part.members.size(); ++group)
    for (size_t i = 0; i < part.members[group].size(); ++i) {
      const std::string& name = (*names)[group][i];
      const Value& weights = masters ? *numbered.masters[group][i] : *model.module.at(name);
      FlatGroup flat{.weights = {file, archive.offset_of(weights, name), weights.place->numel()}, .states = {}};
      if (weights.place->dtype != at::kFloat)
        throw CheckpointError(
            str(where, ": the master of \"", name, "\" is ", weights.place->dtype, ", expected Float"));
      const int64_t number = part.members[group][i];
      if (const Value* state = state_at(base, number))
        read_states(archive, *state, str(where, ": state[", number, "]"), flat);
      part.members[group][i] = static_cast<int64_t>(part.groups.size());
      part.groups.push_back(std::move(flat));
      result.trained.push_back({{name, weights.place->shape, weights.place->numel()}});
    }
  result.part = std::move(part);
  return result;
}

}  // namespace trireme::deepspeed
