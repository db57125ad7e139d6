#include "cli/init_weights.h"

#include <ATen/core/grad_mode.h>

#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/suggest.h"
#include "trireme/checkpoint/safetensors.h"

namespace trireme::cli {

void init_weights(LanguageModel& model, const std::filesystem::path& path) {
  const at::NoGradGuard no_grad;
  auto weights = read_safetensors(path);
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters()) {
    names.push_back(item.key());
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
        str("--init-from ", path.string(), ": the model has no parameter '", name, "'.", did_you_mean(name, names)));
  }
}

}  // namespace trireme::cli
