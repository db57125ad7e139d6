// Rules by names and by the order of a block's layers, for models that nobody has described.
#include <algorithm>
#include <map>
#include <set>

#include "tensor/rules.h"
#include "trireme/base/error.h"

namespace trireme::tensor {
namespace {

std::string module_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

std::string leaf_of(const std::string& module) { return module.substr(module.rfind('.') + 1); }

/// "h.3" of "h.3.mlp.fc"; "" outside of numbered blocks.
std::string block_of(const std::string& name) {
  const std::string pattern = generic(name);
  const size_t star = pattern.find(".*.");
  if (star == std::string::npos) return "";
  return name.substr(0, name.find('.', star + 1));
}

/// Behind it, and behind its bias, the next module in the one around both is a norm.
bool is_before_norm(const std::vector<NamedShape>& parameters, size_t i) {
  const std::string module = module_of(parameters[i].name);
  while (i < parameters.size() && module_of(parameters[i].name) == module) ++i;
  return i < parameters.size() && parameters[i].shape.size() == 1 && parameters[i].name.ends_with(".weight") &&
         module_of(module_of(parameters[i].name)) == module_of(module);
}

bool has(const std::set<std::string>& names, const std::string& leaf) { return names.contains(leaf); }

// Layers that take what ranks have in parts, in whatever family.
const std::set<std::string> kRows = {"o_proj", "out_proj",      "down_proj", "dense_4h_to_h", "fc2",
                                     "wo",     "attention_out", "w2",        "c_proj",        "proj_out"};
// In an attention.
const std::set<std::string> kAttentionRows = {"dense", "o", "proj", "wo"};
// Layers whose outputs every rank needs.
const std::set<std::string> kRouters = {"gate", "router"};
const std::set<std::string> kLatents = {"q_a_proj", "kv_a_proj_with_mqa"};

// GPT-2's weights are [inputs, outputs], the relative positions of the others are added between heads: names do not
// tell.
const std::set<std::string> kUnknowable = {"deberta", "deberta-v2", "flaubert", "fsmt", "gpt2",
                                           "led",     "longformer", "xlm",      "xlnet"};

}  // namespace

RuleSet heuristic_rules(const PartitionModel& model) {
  RuleSet rules{.source = "heuristics"};
  if (has(kUnknowable, model.model_type))
    throw ConfigError(str("tensor_parallel: heuristics do not know how to cut a model of type ", model.model_type,
                          "; give preset_model or partition_config"),
                      ErrorCode::kUnsupported);
  std::set<std::string> columns, rows, parts_with_columns, parts_with_rows, blocks_with_experts;
  const auto& parameters = model.parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string& name = parameters[i].name;
    const std::string module = module_of(name), block = block_of(name), leaf = leaf_of(module);
    if (parameters[i].shape.size() != 2 || !name.ends_with(".weight") || block.empty()) continue;
    if (has(kRouters, leaf) || has(kLatents, leaf)) continue;
    const bool is_attention = is_in_attention(name);
    const bool is_row = has(kRows, leaf) || (is_attention && has(kAttentionRows, leaf)) ||
                        (model.is_ordered && is_before_norm(parameters, i));
    (is_row ? rows : columns).insert(name);
    (is_row ? parts_with_rows : parts_with_columns)
        .insert(block + (is_attention ? ", attention" : ", beside attention"));
    if (name.find(".experts.") != std::string::npos) blocks_with_experts.insert(block);
  }
  for (const std::string& part : parts_with_columns)
    if (!parts_with_rows.contains(part))
      throw ConfigError(str("tensor_parallel: heuristics find no layer in `", part,
                            "`, that takes the features of its others; give preset_model or partition_config"));
  if (rows.empty())
    throw ConfigError(
        "tensor_parallel: heuristics find no numbered blocks of layers; give preset_model or partition_config");
  rules.rules.push_back({.text = "heuristics: its name, or a norm behind it",
                         .matches = [rows](const std::string& name) { return rows.contains(name); },
                         .cutting = Cutting::kRow});
  rules.rules.push_back({.text = "heuristics: a matrix of a block",
                         .matches = [columns](const std::string& name) { return columns.contains(name); },
                         .cutting = Cutting::kColumn});
  rules.rules.push_back({.text = "heuristics: a router of experts",
                         .matches =
                             [blocks_with_experts](const std::string& name) {
                               return has(kRouters, leaf_of(module_of(name))) &&
                                      blocks_with_experts.contains(block_of(name));
                             },
                         .cutting = Cutting::kNone,
                         .sums_gradient = true,
                         .why = kRouterWhy});
  return rules;
}

}  // namespace trireme::tensor
