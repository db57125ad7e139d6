#include "checkpoint/export/weights_plan.h"

#include <set>
#include <unordered_map>

#include "trireme/base/error.h"
#include "trireme/base/state_names.h"
#include "trireme/checkpoint/reshard.h"
#include "trireme/checkpoint/training_values.h"

namespace trireme {
namespace {

/// The parameters that were never trained: a trained one has optimizer states or, where the optimizer keeps none, a
/// count of steps.
class FrozenParameters {
 public:
  FrozenParameters(const CheckpointSource& source, const TrainingValues& values) : folder_(source.folder.string()) {
    for (const SavedTensor& tensor : source.manifest.tensors) {
      const StateName name = parse_state_name(tensor.name);
      if (name.kind == StateKind::kMaster || name.kind == StateKind::kOptimizerState) trained_.emplace(name.parameter);
    }
    for (const auto& [name, count] : values.steps) {
      parameters_.insert(name);
      if (count > 0) trained_.insert(name);
    }
    if (parameters_.empty() || trained_.empty())
      throw CheckpointError(str(folder_,
                                ": nothing in this checkpoint tells frozen parameters from others (it has no "
                                "optimizer states and no steps); keep them"));
  }

  bool contains(const std::string& name) const { return parameters_.contains(name) && !trained_.contains(name); }

 private:
  const std::string folder_;
  std::set<std::string> parameters_, trained_;
};

}  // namespace

WeightsPlan plan_weights(const CheckpointSource& source, const WeightRequest& request) {
  const std::vector<SavedTensor>& tensors = source.manifest.tensors;
  std::optional<FrozenParameters> frozen;
  const TrainingValues values = training_values(source.manifest);
  if (request.exclude_frozen_parameters) frozen.emplace(source, values);
  std::unordered_map<std::string, size_t> master_of;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (const StateName name = parse_state_name(tensors[i].name); name.kind == StateKind::kMaster)
      master_of[std::string(name.parameter)] = i;

  WeightsPlan plan;
  std::set<std::string> names;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const SavedTensor& tensor = tensors[i];
    const StateName name = parse_state_name(tensor.name);
    if (name.kind != StateKind::kWeight) continue;
    PlannedWeight weight{i, std::string(name.parameter), tensor.dtype, checked_numel(tensor.shape, tensor.name)};
    if (frozen && frozen->contains(weight.name)) continue;
    const bool converts = request.dtype && c10::isFloatingType(tensor.dtype) && *request.dtype != tensor.dtype;
    if (converts) weight.dtype = *request.dtype;
    const auto master = converts || request.masters ? master_of.find(weight.name) : master_of.end();
    if (master != master_of.end()) {  // it is what the weight was rounded from
      weight.tensor = master->second;
      if (request.masters) weight.dtype = tensors[weight.tensor].dtype;
      if (tensors[weight.tensor].shape != tensor.shape)
        throw CheckpointError(
            str(source.folder.string(), ": tensor \"", tensor.name, "\" and its master have different shapes"));
    }
    names.insert(weight.name);
    plan.weights.push_back(std::move(weight));
  }
  if (plan.weights.empty())
    throw CheckpointError(str(source.folder.string(), ": this checkpoint holds no weights (tensors \"model.…\")"));
  for (const auto& [alias, name] : values.aliases)
    if (names.contains(name) && !names.contains(alias)) plan.aliases.emplace(alias, name);
  return plan;
}

std::vector<std::vector<size_t>> spread_over_files(const std::vector<PlannedWeight>& weights, int64_t max_bytes) {
  std::vector<std::vector<size_t>> files(1);
  int64_t bytes = 0;
  for (size_t i = 0; i < weights.size(); ++i) {
    if (!files.back().empty() && weights[i].bytes() > max_bytes - bytes) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(i);
    bytes += weights[i].bytes();
  }
  return files;
}

}  // namespace trireme
