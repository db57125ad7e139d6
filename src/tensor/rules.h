// Rules of every source in one form: which names they match, and what becomes of such a parameter.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tensor/cuts.h"
#include "trireme/tensor/partition.h"

namespace trireme::tensor {

enum class Cutting {
  kNone,
  kColumn,
  kRow,
  kVocabulary,  ///< of an embedding
  kEmbedding,
  kHead,  ///< outputs of the layer that makes logits
};

struct Rule {
  std::string text = {};  ///< "preset llama: `.*\.o_proj`"
  std::function<bool(const std::string&)> matches = {};
  Cutting cutting = Cutting::kNone;
  std::optional<Units> units = std::nullopt;  ///< default: by the name
  bool is_transposed = false;                 ///< a matrix [inputs, outputs], as GPT-2 has them
  std::optional<int> dim = std::nullopt;      ///< default: that of outputs or inputs
  std::vector<int64_t> sub_sizes = {};        ///< as TensorLayerSpec has them
  int64_t sub_count = 0;
  int64_t inputs = -1;
  bool gathers_output = false;
  bool splits_input = false;
  bool sums_gradient = false;
  bool exchanges = true;   ///< false: the module around it does
  bool is_needed = false;  ///< a rule that matches nothing is an error
  bool is_noted = false;   ///< and is noted
  std::string why = {};    ///< default: by the cutting
};

struct RuleSet {
  std::string source;
  std::vector<Rule> rules = {};
  std::vector<TensorUse> modules = {};
  bool is_strict = false;  ///< a matrix without a rule is an error
  int embedding_dim = 0;
  std::vector<std::string> head_patterns = {"lm_head", "embed_out"};
};

/// `pattern` from a name's beginning on. Throws ConfigError, with `key`, where it is no regular expression.
std::function<bool(const std::string&)> pattern_matcher(const std::string& pattern, const std::string& key);

/// "model.layers.*.mlp" of "model.layers.3.mlp".
std::string generic(const std::string& name);

/// The units for which a layer of this name in an attention has a stretch; nothing where its name does not tell.
std::optional<Units> head_units(const std::string& leaf);
/// The names that head_units() knows, between commas.
std::string head_names();
/// Whether a module around it is an attention, by its name.
bool is_in_attention(const std::string& name);

inline constexpr const char* kRouterWhy =
    "the router: every rank chooses the same experts, and has a part of their outputs, which its gradient comes from";

/// Whether there is a preset for exactly this model_type.
bool has_preset(const std::string& model_type);
/// Throws    ConfigError: an unknown name.
RuleSet preset_rules(const std::string& name);
RuleSet tp_plan_rules(const std::vector<std::pair<std::string, std::string>>& tp_plan, const PartitionModel& model);
RuleSet config_rules(const TensorParallelOptions& options, const PartitionModel& model);
RuleSet heuristic_rules(const PartitionModel& model);
/// Token embeddings, output heads and norms of single heads, behind all others.
std::vector<Rule> common_rules(const RuleSet& rules);
/// Throws    ConfigError: a norm over all heads together, of which each rank would have some.
void check_head_norms(const PartitionModel& model);

}  // namespace trireme::tensor
