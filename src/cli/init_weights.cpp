#include "cli/init_weights.h"

#include <ATen/core/grad_mode.h>

#include <torch/nn/module.h>

#include "trireme/base/error.h"
#include "trireme/base/suggest.h"

namespace trireme::cli {
namespace {

// Buffers in files beside parameters: GPT-2's causal masks, which are computed here.
bool is_known_buffer(const std::string& name) {
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

}  // namespace

InitialWeights read_initial_weights(const std::filesystem::path& path, const std::set<std::string>& names) {
  InitialWeights weights{.path = path, .tensors = {}};
  for (const auto& [key, tensor] : read_safetensors(path)) {
    // The published files of GPT-2 leave `transformer.` out.
    const std::string name = names.contains("transformer." + key) ? "transformer." + key : key;
    if (names.contains(name)) {
      weights.tensors.emplace(name, tensor);
      continue;
    }
    // A model with tied embeddings has no parameter of this name, but some files keep both.
    if (is_known_buffer(key) || key == "lm_head.weight") continue;
    throw ConfigError(str("--init-from ", path.string(), ": the model has no parameter '", key, "'.",
                          did_you_mean(key, {names.begin(), names.end()})));
  }
  for (const std::string& name : names)
    if (!weights.tensors.contains(name))
      throw ConfigError(str("--init-from ", path.string(), ": no tensor '", name, "', which the model needs"));
  return weights;
}

void init_weights(torch::nn::Module& module, const InitialWeights& weights, const std::string& prefix) {
  const at::NoGradGuard no_grad;
  for (const auto& item : module.named_parameters()) {
    const std::string name = prefix + item.key();
    const at::Tensor& tensor = weights.tensors.at(name);
    if (tensor.sizes() != item.value().sizes()) {
      throw ConfigError(str("--init-from ", weights.path.string(), ": '", name, "' has shape ", tensor.sizes(),
                            ", the model's is ", item.value().sizes()));
    }
    item.value().copy_(tensor);
  }
}

}  // namespace trireme::cli
