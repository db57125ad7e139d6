#include "trireme/tensor/partition.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "tensor/cuts.h"
#include "tensor/rules.h"
#include "tensor/wrapped_layers.h"
#include "trireme/base/error.h"
#include "trireme/base/suggest.h"

namespace trireme {
namespace tensor {
namespace {

/// "q_proj" of "layers.0.self_attn.q_proj.weight".
std::string layer_of(std::string name) {
  if (name.ends_with(".weight") || name.ends_with(".bias")) name.resize(name.rfind('.'));
  return name.substr(name.rfind('.') + 1);
}

Units units_of(const Rule& rule, const std::string& name) {
  if (rule.units) return *rule.units;
  if (!is_in_attention(name)) return Units::kFeatures;
  if (rule.cutting == Cutting::kRow) return Units::kHeads;
  const std::string leaf = layer_of(name);
  if (const auto units = head_units(leaf)) return *units;
  // Keys and values in one matrix: in which order, the name does not tell.
  if (leaf.find("kv") == std::string::npos) return Units::kHeads;
  if (rule.sub_count > 0 || !rule.sub_sizes.empty()) return Units::kKeyValueHeads;
  throw ConfigError("its name does not tell how keys and values stand in it; give a shape, such as [2, -1]");
}

int64_t total(const RankIntervals& cut) {
  int64_t sum = 0;
  for (const std::vector<Interval>& intervals : cut)
    for (const Interval& interval : intervals) sum += interval.size();
  return sum;
}

bool is_packed(const Rule& rule) { return rule.sub_count > 0 || !rule.sub_sizes.empty(); }

/// The output of all ranks, or the input of all ranks, one behind the other is the whole one, heads or not.
bool is_contiguous(const Rule& rule) { return rule.gathers_output || rule.splits_input; }

/// The dim along which a weight is cut; a vector is cut along its only dim.
int dim_of(const Rule& rule, int dims) {
  if (dims == 1) return 0;
  if (rule.dim && *rule.dim >= dims)
    throw ConfigError(str("partition_dim=", *rule.dim, ", and it has ", dims, " dims"));
  if (rule.dim) return *rule.dim;
  switch (rule.cutting) {
    case Cutting::kColumn:
      return rule.is_transposed ? dims - 1 : dims - 2;
    case Cutting::kRow:
      return rule.is_transposed ? dims - 2 : dims - 1;
    case Cutting::kEmbedding:
      return 1;
    default:
      return 0;
  }
}

PartitionKind kind_of(const Rule& rule, Units units) {
  const bool packed = is_packed(rule) || units == Units::kStackedQkv;
  switch (rule.cutting) {
    case Cutting::kColumn:
      return packed ? PartitionKind::kPackedColumn : PartitionKind::kColumn;
    case Cutting::kRow:
      return packed ? PartitionKind::kPackedRow : PartitionKind::kRow;
    case Cutting::kEmbedding:
      return PartitionKind::kEmbedding;
    case Cutting::kNone:
      return PartitionKind::kReplicated;
    default:
      return PartitionKind::kVocabulary;
  }
}

void set_exchanges(TensorUse& use, const Rule& rule) {
  if (!rule.exchanges) return;
  switch (rule.cutting) {
    case Cutting::kColumn:
    case Cutting::kHead:
      use.input_gradient = TensorExchange::kAllReduce;
      if (!rule.gathers_output) return;
      use.output = TensorExchange::kGather;
      use.output_gradient = TensorExchange::kSplit;
      return;
    case Cutting::kRow:
      use.output = TensorExchange::kAllReduce;
      if (!rule.splits_input) return;
      use.input = TensorExchange::kSplit;
      use.input_gradient = TensorExchange::kGather;
      return;
    case Cutting::kVocabulary:
      use.output = TensorExchange::kAllReduce;
      return;
    case Cutting::kEmbedding:
      use.output = TensorExchange::kGather;
      use.output_gradient = TensorExchange::kSplit;
      return;
    case Cutting::kNone:
      return;
  }
}

std::string why_of(const Rule& rule, Units units, const Heads& heads) {
  if (rule.gathers_output) return "outputs, which are gathered: any of them may stand on any rank";
  if (rule.splits_input) return "inputs, of which each rank takes its own from the whole";
  const bool is_row = rule.cutting == Cutting::kRow;
  if (heads.queries == 0 && units != Units::kFeatures)
    return is_row ? "takes the features of the rank's own heads, whose number is unknown: equal shares"
                  : "equal shares, each of whole heads, whose number is unknown";
  switch (units) {
    case Units::kHeads:
      return is_row ? str("takes the outputs of the rank's own heads, of ", heads.queries)
                    : str("whole query heads, of ", heads.queries);
    case Units::kKeyValueHeads:
      return str("whole key/value heads, of ", heads.key_values);
    case Units::kStackedQkv:
      return str("whole heads of each of queries, keys and values: ", heads.queries, ", ", heads.key_values, " and ",
                 heads.key_values);
    case Units::kGroupedQkv:
      return str("whole heads: ", heads.key_values, " of keys and values, each with its ",
                 heads.queries / heads.key_values, heads.queries == heads.key_values ? " query head" : " query heads");
    case Units::kFeatures:
      break;
  }
  switch (rule.cutting) {
    case Cutting::kVocabulary:
      return "tokens: a rank looks up its own, and 0 for the others";
    case Cutting::kHead:
      return "tokens: a rank makes the logits of its own";
    case Cutting::kEmbedding:
      return "a rank looks up a part of every token's vector";
    case Cutting::kRow:
      return "takes the features that the rank itself makes";
    default:
      break;
  }
  if (!is_packed(rule)) return "features, which the rank's own rows take";
  return str("features of each of ", rule.sub_sizes.empty() ? rule.sub_count : int64_t(rule.sub_sizes.size()),
             " matrices in one, which the rank's own rows take");
}

/// "a.*.b.weight, c.weight, …".
std::string matrices_of(const PartitionModel& model) {
  std::vector<std::string> names;
  for (const NamedShape& parameter : model.parameters)
    if (parameter.shape.size() > 1 && std::find(names.begin(), names.end(), generic(parameter.name)) == names.end())
      names.push_back(generic(parameter.name));
  std::string text;
  constexpr size_t kShown = 24;
  for (size_t i = 0; i < std::min(names.size(), kShown); ++i) text += (i ? ", " : "") + names[i];
  return text + (names.size() > kShown ? str(" and ", names.size() - kShown, " more") : "");
}

bool is_head_norm(const std::string& name) {
  if (!is_in_attention(name)) return false;
  for (const char* norm : {".q_norm.weight", ".k_norm.weight", ".q_layernorm.weight", ".k_layernorm.weight"})
    if (name.ends_with(norm)) return true;
  return false;
}

/// Rules name parameters of a model with and without peft around it.
bool is_for(const Rule& rule, const std::string& name) {
  if (rule.matches(name)) return true;
  const std::string_view prefix = kPeftPrefix;
  return name.starts_with(prefix) && rule.matches(name.substr(prefix.size()));
}

class Partitioner {
 public:
  Partitioner(const PartitionModel& model, int ranks, int64_t grain, RuleSet rules)
      : model_(model), ranks_(ranks), grain_(grain), rules_(std::move(rules)) {
    heads_ = {model.heads, model.key_value_heads > 0 ? model.key_value_heads : model.heads};
    for (const NamedShape& parameter : model.parameters) {
      names_.insert(parameter.name);
      names_.insert(parameter.tied.begin(), parameter.tied.end());
    }
    was_used_.assign(rules_.rules.size(), false);
    behind_ = common_rules(rules_);
  }

  PartitionPlan plan() {
    PartitionPlan plan{.ranks = ranks_, .source = rules_.source};
    for (const NamedShape& parameter : model_.parameters) plan.parameters.push_back(partitioned(parameter));
    plan.modules = rules_.modules;
    check_used(plan);
    return plan;
  }

 private:
  /// The first that matches. Rules name weights, and a bias goes with its weight.
  const Rule* rule_for(std::string name) {
    if (name.ends_with(".bias") && names_.contains(name.substr(0, name.size() - 4) + "weight"))
      name.replace(name.size() - 4, 4, "weight");
    const Rule* first = nullptr;
    for (size_t i = 0; i < rules_.rules.size(); ++i) {
      if (!is_for(rules_.rules[i], name)) continue;
      was_used_[i] = true;
      if (!first) first = &rules_.rules[i];
    }
    for (size_t i = 0; i < behind_.size() && !first; ++i)
      if (is_for(behind_[i], name)) first = &behind_[i];
    return first;
  }

  PartitionedParameter partitioned(const NamedShape& parameter) {
    PartitionedParameter result = under_rule(parameter, parameter.name);
    for (const std::string& name : parameter.tied) {
      PartitionedParameter other = under_rule(parameter, name);
      std::vector<TensorUse> uses = result.uses;
      uses.push_back(other.uses.front());
      if (result.kind == PartitionKind::kReplicated)
        result = std::move(other);
      else if (other.kind != PartitionKind::kReplicated && other.parts != result.parts)
        throw ConfigError(str("tensor_parallel: `", parameter.name, "` and `", name, "` are one tensor, and ",
                              result.rule, " and ", other.rule, " cut it differently; let them agree"));
      result.uses = std::move(uses);
    }
    for (const std::string& name : parameter.tied) result.why += str("; tied to ", name);
    return result;
  }

  PartitionedParameter under_rule(const NamedShape& parameter, const std::string& name) {
    PartitionedParameter result{.name = parameter.name, .uses = {{.name = name}}};
    result.parts.assign(static_cast<size_t>(ranks_), {.shape = parameter.shape});
    const Rule* found = rule_for(name);
    const bool is_matrix = parameter.shape.size() > 1;
    if (!found) {
      if (rules_.is_strict && is_matrix)
        throw ConfigError(str("tensor_parallel.partition_config.strict_mode: no pattern matches `", name,
                              "`; add a layer spec for it, of partition_type skip to have all of it on every rank"));
      result.rule = "none";
      result.why = is_matrix ? "no rule names it" : "all of it is used on every rank";
      return result;
    }
    Rule rule = *found;
    result.rule = rule.text;
    result.why = rule.why.empty() ? "the rule says so" : rule.why;
    result.sums_gradient = rule.sums_gradient;
    // The other use is the head, whose outputs are tokens.
    if (rule.cutting == Cutting::kEmbedding && !parameter.tied.empty()) rule.cutting = Cutting::kVocabulary;
    if (rule.cutting == Cutting::kNone || ranks_ == 1) return result;
    if (parameter.shape.size() == 1 && (rule.cutting == Cutting::kRow || rule.cutting == Cutting::kEmbedding)) {
      result.why = "added once, to the sum of the ranks' products";
      return result;
    }
    try {
      cut(result, parameter, name, rule);
    } catch (const ConfigError& error) {
      throw ConfigError(str("tensor_parallel.autotp_size=", ranks_, ": `", name, "` ", shape_text(parameter.shape),
                            " (", rule.text, "): ", error.what()),
                        error.code());
    }
    return result;
  }

  void cut(PartitionedParameter& result, const NamedShape& parameter, const std::string& name, const Rule& rule) {
    if (parameter.shape.empty()) throw ConfigError("a scalar is not cut");
    const bool has_units = (rule.cutting == Cutting::kColumn || rule.cutting == Cutting::kRow) && !is_contiguous(rule);
    const Units units = has_units ? units_of(rule, name) : Units::kFeatures;
    const int dim = dim_of(rule, static_cast<int>(parameter.shape.size()));
    const int64_t extent = parameter.shape[dim];
    if (rule.inputs >= 0 && parameter.shape.size() > 1 && parameter.shape.back() != rule.inputs)
      throw ConfigError(str("its last dim is ", parameter.shape.back(), ", and that of the shape ", rule.inputs));
    const RankIntervals intervals = is_packed(rule) ? cut_packed(extent, units, rule) : cut_units(extent, units);
    for (int rank = 0; rank < ranks_; ++rank) result.parts[rank] = canonical({parameter.shape, dim, intervals[rank]});
    result.kind = kind_of(rule, units);
    if (rule.why.empty()) result.why = why_of(rule, units, heads_);
    if (total(intervals) > extent) {
      result.sums_gradient = true;
      result.why += "; ranks share a key/value head, for there are more ranks";
    }
    if (parameter.shape.size() > 1) set_exchanges(result.uses.front(), rule);
  }

  RankIntervals cut_units(int64_t extent, Units units) const {
    if (units == Units::kFeatures) return cut_features(extent, ranks_, grain_);
    if (heads_.queries > 0) return cut_by_heads(extent, units, heads_, ranks_);
    // A run finds out where heads begin. Sections that are no thirds are gathered there.
    if (units != Units::kStackedQkv || extent % 3 != 0) return cut_equally(extent, ranks_);
    return stack({extent / 3, extent / 3, extent / 3}, std::vector<RankIntervals>(3, cut_equally(extent / 3, ranks_)));
  }

  /// Matrices one behind the other. Three in an attention are its queries, keys and values.
  RankIntervals cut_packed(int64_t extent, Units units, const Rule& rule) const {
    std::vector<int64_t> sizes = rule.sub_sizes;
    if (sizes.empty()) {
      if (extent % rule.sub_count != 0)
        throw ConfigError(str("its dim of ", extent, " does not divide by the shape's ", rule.sub_count,
                              " matrices; give their sizes"));
      sizes.assign(static_cast<size_t>(rule.sub_count), extent / rule.sub_count);
    }
    int64_t sum = 0;
    for (const int64_t size : sizes) sum += size;
    if (sum != extent) throw ConfigError(str("the shape's sizes add up to ", sum, ", and its dim has ", extent));
    const bool is_qkv = sizes.size() == 3 && (units == Units::kStackedQkv || units == Units::kGroupedQkv);
    if (is_qkv && heads_.queries > 0 &&
        (sizes[0] * heads_.key_values != sizes[1] * heads_.queries || sizes[1] != sizes[2]))
      throw ConfigError(str("queries, keys and values of ", sizes[0], ", ", sizes[1], " and ", sizes[2], " are no ",
                            heads_.queries, ", ", heads_.key_values, " and ", heads_.key_values,
                            " heads of one size; give their sizes"));
    const bool has_one_unit = units == Units::kHeads || units == Units::kKeyValueHeads;
    std::vector<RankIntervals> cuts;
    for (size_t i = 0; i < sizes.size(); ++i)
      cuts.push_back(is_qkv ? cut_units(sizes[i], i == 0 ? Units::kHeads : Units::kKeyValueHeads)
                            : cut_units(sizes[i], has_one_unit ? units : Units::kFeatures));
    return stack(sizes, cuts);
  }

  void check_used(PartitionPlan& plan) const {
    bool is_any = rules_.rules.empty();
    for (size_t i = 0; i < rules_.rules.size(); ++i) {
      is_any = is_any || was_used_[i];
      if (rules_.rules[i].is_noted && !was_used_[i])
        plan.notes.push_back(str(rules_.rules[i].text, " matches no parameter"));
      if (rules_.rules[i].is_needed && !was_used_[i])
        throw ConfigError(
            str("tensor_parallel: ", rules_.rules[i].text, " matches no parameter; there are ", matrices_of(model_)));
    }
    if (!is_any)
      throw ConfigError(str("tensor_parallel: no rule of ", rules_.source, " matches a parameter; there are ",
                            matrices_of(model_), ", and it knows ", rule_texts()));
  }

  std::string rule_texts() const {
    constexpr size_t kShown = 12;
    std::string text;
    for (size_t i = 0; i < std::min(rules_.rules.size(), kShown); ++i) text += str(i ? ", " : "", rules_.rules[i].text);
    return text + (rules_.rules.size() > kShown ? str(" and ", rules_.rules.size() - kShown, " more") : "");
  }

  const PartitionModel& model_;
  const int ranks_;
  const int64_t grain_;
  RuleSet rules_;
  std::vector<Rule> behind_;
  Heads heads_;
  std::set<std::string> names_;
  std::vector<bool> was_used_;  ///< by rule
};

int ranks_of(const TensorParallelOptions& options) {
  const int of_config = options.partition_config ? options.partition_config->tp_size : 0;
  if (options.autotp_size < 0)
    throw ConfigError(str("tensor_parallel.autotp_size=", options.autotp_size, ": negative"));
  if (of_config > 0 && options.autotp_size > 0 && of_config != options.autotp_size)
    throw ConfigError(str("tensor_parallel.autotp_size=", options.autotp_size,
                          " and partition_config.tp_size=", of_config, ": let them agree, or leave one out"));
  return std::max({1, options.autotp_size, of_config});
}

/// Rules by priority. `notes` has what they stand before.
RuleSet choose(const PartitionModel& model, const TensorParallelOptions& options, std::vector<std::string>& notes) {
  std::optional<RuleSet> preset;
  if (!options.preset_model.empty()) preset = preset_rules(options.preset_model);
  if (options.partition_config) {
    if (!options.tp_plan.empty()) notes.push_back("the model's tp_plan is not used: partition_config comes first");
    if (preset && !options.partition_config->use_default_specs)
      notes.push_back(str("preset_model=", options.preset_model, " is not used: use_default_specs is false"));
    return config_rules(options, model);
  }
  if (!options.tp_plan.empty()) {
    if (preset)
      notes.push_back(str("preset_model=", options.preset_model,
                          " is not used: the model's tp_plan comes first; a partition_config with use_default_specs "
                          "puts the preset before it"));
    return tp_plan_rules(options.tp_plan, model);
  }
  if (ranks_of(options) > 1) check_head_norms(model);
  if (preset) return std::move(*preset);
  if (has_preset(model.model_type)) {
    RuleSet rules = preset_rules(model.model_type);
    rules.source += ", by model_type";
    return rules;
  }
  return heuristic_rules(model);
}

}  // namespace

std::string generic(const std::string& name) {
  std::string text;
  for (size_t i = 0; i < name.size();) {
    size_t end = i;
    while (end < name.size() && name[end] >= '0' && name[end] <= '9') ++end;
    const bool is_number = end > i && i > 0 && name[i - 1] == '.' && (end == name.size() || name[end] == '.');
    if (is_number) {
      text += '*';
      i = end;
    } else {
      text += name[i++];
    }
  }
  return text;
}

// Layers in an attention whose name tells which heads are in their outputs.
struct HeadName {
  const char* leaf;
  Units units;
};
constexpr HeadName kHeadNames[] = {
    {"q_proj", Units::kHeads},
    {"k_proj", Units::kKeyValueHeads},
    {"v_proj", Units::kKeyValueHeads},
    {"query", Units::kHeads},
    {"key", Units::kKeyValueHeads},
    {"value", Units::kKeyValueHeads},
    {"q", Units::kHeads},
    {"k", Units::kKeyValueHeads},
    {"v", Units::kKeyValueHeads},
    {"q_b_proj", Units::kHeads},
    {"kv_b_proj", Units::kHeads},
    {"qkv_proj", Units::kStackedQkv},
    {"c_attn", Units::kStackedQkv},
    {"Wqkv", Units::kStackedQkv},
    {"W_pack", Units::kStackedQkv},
    {"query_key_value", Units::kGroupedQkv},
};

std::optional<Units> head_units(const std::string& leaf) {
  for (const HeadName& one : kHeadNames)
    if (leaf == one.leaf) return one.units;
  return std::nullopt;
}

std::string head_names() {
  std::string names;
  for (const HeadName& one : kHeadNames) names += str(names.empty() ? "" : ", ", one.leaf);
  return names;
}

bool is_in_attention(const std::string& name) {
  const std::string around = name.substr(0, name.find_last_of('.', name.find_last_of('.') - 1) + 1);
  for (const char* word : {"attn.", "attention.", "Attention."})
    if (around.find(word) != std::string::npos) return true;
  return false;
}

std::vector<Rule> common_rules(const RuleSet& rules) {
  const Cutting embedding = rules.embedding_dim == 1 ? Cutting::kEmbedding : Cutting::kVocabulary;
  std::vector<Rule> result;
  for (const std::string& pattern : rules.head_patterns)
    result.push_back({.text = str("output head: ", pattern),
                      .matches = [pattern](const std::string& name) { return name.find(pattern) != std::string::npos; },
                      .cutting = Cutting::kHead});
  result.push_back({.text = "token embedding",
                    .matches =
                        [](const std::string& name) {
                          for (const char* layer : {"embed_tokens", "wte", "word_embeddings", "embed_in"}) {
                            const std::string weight = str(layer, ".weight");
                            if (name == weight || name.ends_with("." + weight)) return true;
                          }
                          return false;
                        },
                    .cutting = embedding});
  result.push_back({.text = "norm of a head",
                    .matches = is_head_norm,
                    .cutting = Cutting::kNone,
                    .sums_gradient = true,
                    .why = "each rank uses it on its own heads"});
  return result;
}

void check_head_norms(const PartitionModel& model) {
  for (const NamedShape& norm : model.parameters) {
    if (!is_head_norm(norm.name)) continue;
    const std::string attention = norm.name.substr(0, norm.name.rfind('.', norm.name.rfind('.') - 1) + 1);
    for (const NamedShape& queries : model.parameters)
      if (queries.name == attention + "q_proj.weight" && queries.shape.front() == norm.shape.front() &&
          model.heads != 1)
        throw ConfigError(str("tensor_parallel: `", norm.name,
                              "` is a norm over all heads, of which a rank has some; "
                              "give a partition_config with gather_output for the layers before it"),
                          ErrorCode::kUnsupported);
  }
}

}  // namespace tensor

const char* name_of(PartitionKind kind) noexcept {
  switch (kind) {
    case PartitionKind::kReplicated:
      return "replicated";
    case PartitionKind::kColumn:
      return "column";
    case PartitionKind::kRow:
      return "row";
    case PartitionKind::kPackedColumn:
      return "packed column";
    case PartitionKind::kPackedRow:
      return "packed row";
    case PartitionKind::kVocabulary:
      return "vocabulary";
    case PartitionKind::kEmbedding:
      return "embedding";
  }
  return "";
}

PartitionPlan make_partition_plan(const PartitionModel& model, const TensorParallelOptions& options) {
  if (options.tp_grain_size < 1)
    throw ConfigError(str("tensor_parallel.tp.tp_grain_size=", options.tp_grain_size, ": expected at least 1"));
  std::vector<std::string> notes;
  const tensor::WrappedLayers wrapped(model);
  const PartitionModel unwrapped = wrapped.unwrapped(model);
  tensor::RuleSet rules = tensor::choose(unwrapped, options, notes);
  PartitionPlan plan =
      tensor::Partitioner(unwrapped, tensor::ranks_of(options), options.tp_grain_size, std::move(rules)).plan();
  wrapped.wrap(plan, model);
  plan.notes.insert(plan.notes.begin(), notes.begin(), notes.end());
  return plan;
}

}  // namespace trireme
