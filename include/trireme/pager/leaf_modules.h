// Which modules of a model are leaves: their parameters are gathered all together.
#pragma once

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme {

/// Modules whose parameters are gathered all together at ZeRO stage 3, because ranks may use different parts of them.
struct LeafModuleOptions {
  /// Class names, with or without the part before the last "." or "::"; libtorch's "Impl" may be left out.
  std::vector<std::string> classes = {"transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
                                      "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
                                      "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock"};
  std::vector<std::string> names = {};          ///< as named_modules() has them; "" is the model itself
  std::vector<std::string> name_suffixes = {};  ///< of those names
  bool operator==(const LeafModuleOptions&) const = default;
};

/// The names of the modules that `options` chooses.
///
/// Throws    ConfigError: a name or suffix that no module has, with the names that come close.
std::vector<std::string> find_leaf_modules(const torch::nn::Module& module, const LeafModuleOptions& options);

}  // namespace trireme
