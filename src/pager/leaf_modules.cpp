#include "trireme/pager/leaf_modules.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/pattern.h"
#include "trireme/pager/layout/refusals.h"

namespace trireme {

namespace {

/// "MixtralSparseMoeBlock" of "transformers.models.mixtral.MixtralSparseMoeBlock" and "app::MixtralSparseMoeBlockImpl".
std::string short_class_name(const std::string& name) {
  const size_t separator = name.find_last_of(".:");
  std::string last = separator == std::string::npos ? name : name.substr(separator + 1);
  if (last.ends_with("Impl")) last.resize(last.size() - 4);
  return last;
}

using Names = std::set<std::string>;

void refuse_unknown(const char* key, const std::string& text, const Names& names) {
  std::string known;
  for (const std::string& name : names)
    if (!name.empty()) known += (known.empty() ? "" : ", ") + name;
  throw ConfigError(filled(kNoLeafModule, {key, text, known.empty() ? "no submodules" : known}));
}

}  // namespace

std::vector<std::string> find_leaf_modules(const torch::nn::Module& module, const LeafModuleOptions& options) {
  Names names, leaves;
  std::set<std::string> classes;
  for (const std::string& name : options.classes) classes.insert(short_class_name(name));
  Names found;
  const auto look = [&](const std::string& name, const torch::nn::Module& part) {
    names.insert(name);
    const std::string type = short_class_name(part.name());
    if (!classes.contains(type)) return;
    found.insert(type);
    leaves.insert(name);
  };
  look("", module);  // named_modules() with the module itself would have to share in its ownership
  for (const auto& item : module.named_modules(/*name_prefix=*/"", /*include_self=*/false))
    look(item.key(), *item.value());
  const LeafModuleOptions defaults;
  for (const std::string& name : options.classes)
    if (!found.contains(short_class_name(name)) && std::ranges::find(defaults.classes, name) == defaults.classes.end())
      log(LogLevel::kWarning, str("zero_optimization.leaf_module.classes: the model has no module of class ", name));
  for (const std::string& name : options.names) {
    if (!names.contains(name)) refuse_unknown("names", name, names);
    leaves.insert(name);
  }
  for (const std::string& suffix : options.name_suffixes) {
    const auto ends = [&](const std::string& name) { return name.ends_with(suffix); };
    if (std::ranges::none_of(names, ends)) refuse_unknown("name_suffixes", suffix, names);
    std::ranges::copy_if(names, std::inserter(leaves, leaves.end()), ends);
  }
  return {leaves.begin(), leaves.end()};
}

}  // namespace trireme
