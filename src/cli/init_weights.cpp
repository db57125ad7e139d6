#include "cli/init_weights.h"

#include <ATen/core/grad_mode.h>

#include <set>
#include <string>

#include "trireme/base/error.h"
#include "trireme/base/suggest.h"
#include "trireme/checkpoint/safetensors.h"

namespace trireme::cli {
namespace {

// What files hold beside parameters: GPT-2's causal masks, which are computed here.
bool is_known_buffer(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

// The file's tensors under the model's names: the published files of GPT-2 leave `transformer.` out.
NamedTensors read_weights(const std::filesystem::path& path, const std::set<std::string>& names) {
  NamedTensors weights;
  for (const auto& [name, tensor] : read_safetensors(path)) {
    if (names.contains(name) || !is_known_buffer(name))
      weights.emplace(names.contains("transformer." + name) ? "transformer." + name : name, tensor);
  }
  return weights;
}

}  // namespace

void init_weights(LanguageModel& model, const std::filesystem::path& path) {
  const at::NoGradGuard no_grad;
  const auto parameters = model.named_parameters();
  const auto keys = parameters.keys();
  auto weights = read_weights(path, {keys.begin(), keys.end()});
  for (const auto& item : parameters) {
    const auto found = weights.find(item.key());
    if (found == weights.end()) {
      throw ConfigError(str("--init-from ", path.string(), ": no tensor '", item.key(), "', which the model needs"));
    }
    if (found->second.sizes() != item.value().sizes()) {
      throw ConfigError(str("--init-from ", path.string(), ": '", item.key(), "' has shape ", found->second.sizes(),
                            ", the model's is ", item.value().sizes()));
    }
    item.value().copy_(found->second);
    weights.erase(found);
  }
  weights.erase(
      "lm_head.weight");  // a model with tied embeddings has no parameter of this name, but some files keep both
  for (const auto& [name, tensor] : weights) {
    throw ConfigError(
        str("--init-from ", path.string(), ": the model has no parameter '", name, "'.", did_you_mean(name, keys)));
  }
}

}  // namespace trireme::cli
