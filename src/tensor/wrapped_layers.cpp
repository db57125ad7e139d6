#include "tensor/wrapped_layers.h"

#include <utility>

#include "trireme/base/error.h"

namespace trireme::tensor {
namespace {

/// The modules of a dotted name, and the parameter.
std::vector<std::string> parts_of(const std::string& name) {
  std::vector<std::string> parts(1);
  for (const char letter : name)
    if (letter == '.')
      parts.emplace_back();
    else
      parts.back() += letter;
  return parts;
}

std::string unwrapped_name(const std::string& name) {
  std::string result;
  const std::vector<std::string> parts = parts_of(name);
  for (size_t i = 0; i < parts.size(); ++i) {
    const bool is_inside = i > 0 && i + 1 < parts.size();
    if (is_inside && (parts[i] == "base_layer" || parts[i] == "original_module")) continue;
    if (is_inside && parts[i] == "modules_to_save" && i + 2 < parts.size()) {
      ++i;  // the adapter's name
      continue;
    }
    result += (result.empty() ? "" : ".") + parts[i];
  }
  return result;
}

}  // namespace

WrappedLayers::WrappedLayers(const PartitionModel& model) {
  const std::string wrapped = ".base_layer.";
  for (const NamedShape& parameter : model.parameters)
    for (size_t at = parameter.name.find(wrapped); at != std::string::npos; at = parameter.name.find(wrapped, at + 1))
      layers_.insert(parameter.name.substr(0, at));
}

std::string WrappedLayers::adapted_by(const std::string& parameter) const {
  for (size_t dot = parameter.find('.'); dot != std::string::npos; dot = parameter.find('.', dot + 1))
    if (layers_.contains(parameter.substr(0, dot)) && parameter.compare(dot, 12, ".base_layer.") != 0)
      return parameter.substr(0, dot);
  return "";
}

PartitionModel WrappedLayers::unwrapped(const PartitionModel& model) const {
  PartitionModel result = model;
  result.parameters.clear();
  for (NamedShape parameter : model.parameters) {
    if (!adapted_by(parameter.name).empty()) continue;
    parameter.name = unwrapped_name(parameter.name);
    for (std::string& name : parameter.tied) name = unwrapped_name(name);
    result.parameters.push_back(std::move(parameter));
  }
  return result;
}

void WrappedLayers::wrap(PartitionPlan& plan, const PartitionModel& model) const {
  std::vector<PartitionedParameter> unwrapped = std::exchange(plan.parameters, {});
  auto next = unwrapped.begin();
  for (const NamedShape& parameter : model.parameters) {
    if (const std::string layer = adapted_by(parameter.name); !layer.empty()) {
      PartitionedParameter& adapter = plan.parameters.emplace_back();
      adapter.parts.assign(static_cast<size_t>(plan.ranks), {.shape = parameter.shape});
      adapter.uses.push_back({.name = parameter.name});
      for (const std::string& name : parameter.tied) adapter.uses.push_back({.name = name});
      adapter.rule = str("adapter of ", layer);
      adapter.why = "all of it is used on every rank";
    } else {
      TRIREME_CHECK(next != unwrapped.end(), "no plan of ", parameter.name);
      next->uses.front().name = parameter.name;
      for (size_t i = 0; i < parameter.tied.size(); ++i) next->uses[i + 1].name = parameter.tied[i];
      plan.parameters.push_back(std::move(*next++));
    }
    plan.parameters.back().name = parameter.name;
  }
}

}  // namespace trireme::tensor
