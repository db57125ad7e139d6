// The tp_plan of a transformers model: the name of a module or parameter, with "*" for a number, and a style.
#include <algorithm>
#include <string_view>

#include "tensor/rules.h"
#include "trireme/base/error.h"
#include "trireme/base/suggest.h"

namespace trireme::tensor {
namespace {

struct Style {
  const char* name;
  Rule rule = {};
  bool is_of_module = false;  ///< says something about a module around parameters, and nothing about these
  TensorExchange output = TensorExchange::kNone;  ///< of such a module
};

const std::vector<Style>& styles() {
  static const std::vector<Style> all = {
      {"colwise", {.cutting = Cutting::kColumn}},
      {"colwise_rep", {.cutting = Cutting::kColumn, .gathers_output = true}},
      {"colwise_gather_output", {.cutting = Cutting::kColumn, .gathers_output = true}},
      {"rowwise", {.cutting = Cutting::kRow}},
      {"rowwise_rep", {.cutting = Cutting::kRow, .splits_input = true}},
      {"rowwise_split_input", {.cutting = Cutting::kRow, .splits_input = true}},
      {"packed_colwise", {.cutting = Cutting::kColumn, .sub_count = 2}},
      // Products with weights [inputs, outputs], as experts have them: the last dim is that of outputs.
      {"packed_rowwise", {.cutting = Cutting::kRow, .sub_count = 2, .exchanges = false}},
      {"embedding_rowwise", {.cutting = Cutting::kVocabulary}},
      {"embedding_colwise", {.cutting = Cutting::kEmbedding}},
      {"sequence_parallel",
       {.cutting = Cutting::kNone, .sums_gradient = true, .why = "each rank uses it on its own tokens"}},
      {"replicated_with_grad_allreduce",
       {.cutting = Cutting::kNone, .sums_gradient = true, .why = "each rank uses it on its own heads or features"}},
      {"all_reduce", {}, true, TensorExchange::kAllReduce},
      {"local_params", {}, true},
      {"replicate", {.cutting = Cutting::kNone, .why = "all of it is used on every rank"}},
      {"local_colwise", {.cutting = Cutting::kColumn, .exchanges = false}},
      {"local_rowwise", {.cutting = Cutting::kRow, .exchanges = false}},
      {"local_packed_rowwise", {.cutting = Cutting::kRow, .sub_count = 2, .exchanges = false}},
      {"gather", {}, true, TensorExchange::kAllReduce},
  };
  return all;
}

/// Styles of transformers that are not there yet.
const std::vector<std::string> kLater = {"mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "grouped_gemm",
                                         "ep_dispatch_experts"};

const Style& style_of(const std::string& key, const std::string& name) {
  for (const Style& style : styles())
    if (name == style.name) return style;
  std::string known;
  for (const std::string& style : tp_plan_styles()) known += (known.empty() ? "" : ", ") + style;
  const std::string where = str("tensor_parallel: tp_plan[\"", key, "\"]=\"", name, "\": ");
  if (std::find(kLater.begin(), kLater.end(), name) != kLater.end())
    throw ConfigError(str(where,
                          "this style is not there yet; give a partition_config, for instance with "
                          "use_default_specs and a preset_model. There are ",
                          known),
                      ErrorCode::kUnsupported);
  throw ConfigError(str(where, "unknown style; there are ", known, ".", did_you_mean(name, tp_plan_styles())));
}

/// The part of a dotted name that stands before `end`.
std::string_view last_part(const std::string& name, size_t end) {
  const size_t dot = end == 0 ? std::string::npos : name.rfind('.', end - 1);
  const size_t begin = dot == std::string::npos ? 0 : dot + 1;
  return std::string_view(name).substr(begin, end - begin);
}

bool is_number(std::string_view part) {
  return !part.empty() && part.find_first_not_of("0123456789") == std::string_view::npos;
}

/// `key` is `name` or its end from a dot on; "*" of it stands for a number.
bool is_named(const std::string& key, const std::string& name) {
  size_t key_end = key.size(), end = name.size();
  while (true) {
    const std::string_view wanted = last_part(key, key_end), part = last_part(name, end);
    if (part != wanted && !(wanted == "*" && is_number(part))) return false;
    if (wanted.size() == key_end) return true;
    if (part.size() == end) return false;
    key_end -= wanted.size() + 1;
    end -= part.size() + 1;
  }
}

std::string parent_of(const std::string& name) {
  const size_t dot = name.rfind('.');
  return dot == std::string::npos ? "" : name.substr(0, dot);
}

bool names_module(const std::string& key, const PartitionModel& model) {
  return std::any_of(model.parameters.begin(), model.parameters.end(), [&](const NamedShape& parameter) {
    for (std::string module = parent_of(parameter.name); !module.empty(); module = parent_of(module))
      if (is_named(key, module)) return true;
    return false;
  });
}

}  // namespace

RuleSet tp_plan_rules(const std::vector<std::pair<std::string, std::string>>& tp_plan, const PartitionModel& model) {
  RuleSet rules{.source = "the model's tp_plan"};
  for (const auto& [key, name] : tp_plan) {
    const Style& style = style_of(key, name);
    if (style.is_of_module) {
      if (!names_module(key, model))
        throw ConfigError(str("tensor_parallel: tp_plan[\"", key, "\"]=\"", name,
                              "\" names no module with parameters; give a module's name"));
      rules.modules.push_back({.name = key, .output = style.output});
      continue;
    }
    Rule rule = style.rule;
    rule.text = str("tp_plan: ", key, ", ", name);
    rule.matches = [key = key](const std::string& parameter) {
      return is_named(key, parameter) || is_named(key, parent_of(parameter));
    };
    rule.is_noted = true;
    rules.rules.push_back(std::move(rule));
  }
  return rules;
}

}  // namespace trireme::tensor

namespace trireme {

const std::vector<std::string>& tp_plan_styles() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& style : tensor::styles()) all.emplace_back(style.name);
    return all;
  }();
  return names;
}

}  // namespace trireme
