// The parameters that the model file names: their order, and which of them are trained, frozen or tied.
#include <algorithm>
#include <set>
#include <tuple>

#include "checkpoint/layouts/deepspeed/parts.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/reshard.h"

namespace trireme::deepspeed {

using pickle::Kind;
using pickle::Value;

namespace {

/// A dict from names to torch.Size.
std::vector<Parameter> parameters_of(const Value& shapes, const std::string& where) {
  std::vector<Parameter> parameters;
  if (!shapes.is(Kind::kDict)) throw CheckpointError(where + ": expected a dict of shapes");
  for (size_t i = 0; i < shapes.items.size(); i += 2) {
    if (!shapes.items[i]->is(Kind::kString)) throw CheckpointError(where + ": expected names, found another key");
    const std::string& name = shapes.items[i]->text;
    Parameter parameter{name, numbers_of(*shapes.items[i + 1], str(where, "[\"", name, "\"]"))};
    parameter.numel = checked_numel(parameter.shape, name);
    parameters.push_back(std::move(parameter));
  }
  return parameters;
}

/// Names with the same elements of one storage: all but the first are aliases.
void find_aliases(const std::vector<std::string>& names, ModelPart& model) {
  std::map<std::tuple<std::string, int64_t, std::vector<int64_t>>, std::string> first;
  for (const std::string& name : names) {
    const pickle::TensorPlace& place = *model.module[name]->place;
    if (place.numel() == 0) continue;
    const auto [it, is_first] = first.emplace(std::tuple(place.storage, place.begin, place.shape), name);
    if (!is_first) model.aliases.emplace(name, it->second);
  }
}

}  // namespace

ModelPart read_model(const pickle::TorchArchive& archive, bool weights_are_sharded) {
  const std::string where = archive.path().string();
  const Value& root = archive.root();
  const Value& module = required(root, "module", Kind::kDict, where);
  ModelPart model;
  std::set<std::string> buffers;
  if (const Value* names = root.find("buffer_names"); names && names->is(Kind::kList))
    for (const Value* name : names->items) buffers.insert(name->text);
  for (size_t i = 0; i < module.items.size(); i += 2) {
    const Value& name = *module.items[i];
    if (!name.is(Kind::kString) || !module.items[i + 1]->is(Kind::kTensor))
      throw CheckpointError(
          str(where, ": module[", name.text, "] is no tensor under a name (a module's extra state?)"));
    if (!model.module.emplace(name.text, module.items[i + 1]).second)
      throw CheckpointError(str(where, ": module has \"", name.text, "\" twice"));
    (buffers.contains(name.text) ? model.buffers : model.names).push_back(name.text);
  }
  if (const Value* groups = root.find("param_shapes"); groups && groups->is(Kind::kList))
    for (const Value* shapes : groups->items) model.trained.push_back(parameters_of(*shapes, where + ": param_shapes"));
  if (const Value* frozen = root.find("frozen_param_shapes"); frozen && !frozen->is(Kind::kNone))
    model.frozen = parameters_of(*frozen, where + ": frozen_param_shapes");
  if (!weights_are_sharded) find_aliases(model.names, model);
  if (const Value* shared = root.find("shared_params"); shared && shared->is(Kind::kDict))
    for (size_t i = 0; i < shared->items.size(); i += 2)
      model.aliases[shared->items[i]->text] = shared->items[i + 1]->text;
  std::erase_if(model.names, [&](const std::string& name) { return model.aliases.contains(name); });
  return model;
}

}  // namespace trireme::deepspeed
