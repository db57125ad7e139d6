// First weights from a file instead of from the seed.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "trireme/formats/safetensors.h"

namespace torch::nn {
class Module;
}

namespace trireme::cli {

struct InitialWeights {
  std::filesystem::path path;
  NamedTensors tensors;  ///< by the names of the model's parameters, one for each
};

/// Reads the tensors of a safetensors file (or of a Hugging Face folder or index) for a model whose parameters have
/// these `names`. A tied weight may be missing under its second name. GPT-2 is read as published: without
/// `transformer.` in front, and with the causal masks (`.attn.bias`), which are skipped.
///
/// Throws    IoError, CheckpointError as read_safetensors; ConfigError naming the tensor: missing, or of no parameter's
///           name.
InitialWeights read_initial_weights(const std::filesystem::path& path, const std::set<std::string>& names);

/// Copies them into the parameters of `module`, converting their dtype. `prefix`: of its names in the model, with the
/// dot.
///
/// Throws    ConfigError naming the tensor: another shape.
void init_weights(torch::nn::Module& module, const InitialWeights& weights, const std::string& prefix = "");

}  // namespace trireme::cli
