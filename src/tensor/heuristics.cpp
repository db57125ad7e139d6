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

/// "h.3" of "h.3.mlp.fc.weight", "3" of "3.mlp.fc.weight" (a sequence's or pipeline's layer that has layers); ""
/// outside of numbered blocks.
std::string block_of(const std::string& name) {
  const size_t first = name.find('.');
  const bool is_numbered = first > 0 && name.find_first_not_of("0123456789") == first;
  if (is_numbered && name.find('.', first + 1) != std::string::npos) return name.substr(0, first);
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

struct Column {
  std::string name;
  std::string part;  ///< of its block
  int64_t outputs = 0;
};

struct Found {
  std::vector<Column> columns = {};
  std::set<std::string> rows = {};
  std::map<std::string, std::set<int64_t>> inputs = {};  ///< of the rows of each part of a block
  std::set<std::string> blocks_with_experts = {};
};

Found look_at(const PartitionModel& model) {
  Found found;
  const auto& parameters = model.parameters;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const std::string& name = parameters[i].name;
    const std::string module = module_of(name), block = block_of(name), leaf = leaf_of(module);
    if (parameters[i].shape.size() != 2 || !name.ends_with(".weight") || block.empty()) continue;
    if (has(kRouters, leaf) || has(kLatents, leaf)) continue;
    const bool is_attention = is_in_attention(name);
    const bool is_row = has(kRows, leaf) || (is_attention && has(kAttentionRows, leaf)) ||
                        (model.is_ordered && is_before_norm(parameters, i));
    const std::string part = block + (is_attention ? ", attention" : ", beside attention");
    if (is_row) {
      found.rows.insert(name);
      found.inputs[part].insert(parameters[i].shape[1]);
    } else {
      found.columns.push_back({name, part, parameters[i].shape[0]});
    }
    if (name.find(".experts.") != std::string::npos) found.blocks_with_experts.insert(block);
  }
  return found;
}

std::string listed(const std::set<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

[[noreturn]] void refuse_guess(const std::string& what) {
  throw ConfigError(str("tensor_parallel: heuristics ", what,
                        "; give preset_model or partition_config, or call layers by "
                        "names that they know: in numbered blocks, as layers.0.attn.q_proj; in an attention (a module "
                        "whose name ends with attn or attention) ",
                        head_names(), "; what takes their outputs ", listed(kRows), ", and in an attention ",
                        listed(kAttentionRows)));
}

/// Whether two matrices stand in it, each with as many outputs as a row takes. A column that no row fits is refused.
bool is_packed(const Found& found, const Column& column) {
  const auto rows = found.inputs.find(column.part);
  if (rows == found.inputs.end())
    refuse_guess(str("find no layer in `", column.part, "`, that takes the features of its others"));
  const std::string leaf = leaf_of(module_of(column.name));
  if (is_in_attention(column.name)) {
    if (!head_units(leaf)) refuse_guess(str("do not know which heads are in `", column.name, "`"));
    return false;
  }
  if (rows->second.contains(column.outputs)) return false;
  const bool is_pair = column.outputs % 2 == 0 && rows->second.contains(column.outputs / 2);
  if (!is_pair || leaf != "gate_up_proj")
    refuse_guess(str("find no layer that takes the ", column.outputs, " features of `", column.name, "`"));
  return true;
}

}  // namespace

RuleSet heuristic_rules(const PartitionModel& model) {
  RuleSet rules{.source = "heuristics"};
  if (has(kUnknowable, model.model_type))
    throw ConfigError(str("tensor_parallel: heuristics do not know how to cut a model of type ", model.model_type,
                          "; give preset_model or partition_config"),
                      ErrorCode::kUnsupported);
  const Found found = look_at(model);
  const std::set<std::string>& rows = found.rows;
  std::set<std::string> columns, packed;
  for (const Column& column : found.columns) (is_packed(found, column) ? packed : columns).insert(column.name);
  const std::set<std::string>& blocks_with_experts = found.blocks_with_experts;
  if (rows.empty()) refuse_guess("find no numbered blocks of layers");
  rules.rules.push_back({.text = "heuristics: its name, or a norm behind it",
                         .matches = [rows](const std::string& name) { return rows.contains(name); },
                         .cutting = Cutting::kRow});
  rules.rules.push_back({.text = "heuristics: a matrix of a block",
                         .matches = [columns](const std::string& name) { return columns.contains(name); },
                         .cutting = Cutting::kColumn});
  rules.rules.push_back({.text = "heuristics: two matrices in one, of a block",
                         .matches = [packed](const std::string& name) { return packed.contains(name); },
                         .cutting = Cutting::kColumn,
                         .sub_count = 2});
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
