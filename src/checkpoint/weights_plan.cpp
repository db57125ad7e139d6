#include "checkpoint/weights_plan.h"

#include <nlohmann/json.hpp>
#include <set>
#include <unordered_map>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/reshard.h"

namespace trireme {
namespace {

constexpr std::string_view kModelPrefix = "model.";
constexpr std::string_view kMasterPrefix = "master.";
constexpr std::string_view kOptimizerPrefix = "optimizer.";

/// What an optimizer keeps for a parameter tells that it is trained; an optimizer that keeps nothing counts its steps.
class FrozenParameters {
 public:
  explicit FrozenParameters(const CheckpointSource& source) : folder_(source.folder.string()) {
    for (const SavedTensor& tensor : source.manifest.tensors) {
      if (tensor.name.starts_with(kMasterPrefix)) trained_.insert(tensor.name.substr(kMasterPrefix.size()));
      if (!tensor.name.starts_with(kOptimizerPrefix)) continue;
      const size_t state_end = tensor.name.find('.', kOptimizerPrefix.size());
      if (state_end != std::string::npos) trained_.insert(tensor.name.substr(state_end + 1));
    }
    const Json values = Json::parse(source.manifest.values);
    if (const auto steps = values.find("parameter_steps"); steps != values.end() && steps->is_object())
      for (const auto& [name, count] : steps->items()) {
        parameters_.insert(name);
        if (count.is_number() && count > 0) trained_.insert(name);
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
  if (request.exclude_frozen_parameters) frozen.emplace(source);
  std::unordered_map<std::string, size_t> master_of;
  for (size_t i = 0; i < tensors.size(); ++i)
    if (tensors[i].name.starts_with(kMasterPrefix)) master_of[tensors[i].name.substr(kMasterPrefix.size())] = i;

  WeightsPlan plan;
  std::set<std::string> names;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const SavedTensor& tensor = tensors[i];
    if (!tensor.name.starts_with(kModelPrefix)) continue;
    PlannedWeight weight{i, tensor.name.substr(kModelPrefix.size()), tensor.dtype,
                         checked_numel(tensor.shape, tensor.name)};
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
  const Json values = Json::parse(source.manifest.values);
  if (const auto aliases = values.find("aliases"); aliases != values.end() && aliases->is_object())
    for (const auto& [alias, name] : aliases->items())
      if (name.is_string() && names.contains(name.get<std::string>()) && !names.contains(alias))
        plan.aliases.emplace(alias, name.get<std::string>());
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
