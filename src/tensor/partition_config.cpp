// DeepSpeed's partition_config: read from JSON, and as rules.
#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "tensor/rules.h"
#include "trireme/base/error.h"
#include "trireme/base/suggest.h"

namespace trireme {
namespace {

constexpr const char* kSection = "tensor_parallel.partition_config";

[[noreturn]] void refuse(const std::string& key, const Json& value, const std::string& expected) {
  throw ConfigError(str(key, "=", value.dump(), ": expected ", expected));
}

void check_keys(const Json& json, const std::string& at, const std::vector<std::string>& known) {
  if (!json.is_object()) refuse(at, json, "an object");
  for (const auto& [key, value] : json.items())
    if (std::find(known.begin(), known.end(), key) == known.end())
      throw ConfigError(str(at, ": unknown key `", key, "`.", did_you_mean(key, known)));
}

/// Nothing where `key` is absent or null.
const Json* find(const Json& json, const char* key) {
  const auto found = json.find(key);
  return found == json.end() || found->is_null() ? nullptr : &*found;
}

void read_flag(const Json& json, const std::string& at, const char* key, bool& value) {
  const Json* found = find(json, key);
  if (!found) return;
  if (!found->is_boolean()) refuse(str(at, ".", key), *found, "true or false");
  value = found->get<bool>();
}

int whole_of(const Json& json, const std::string& key, int least, int most) {
  if (!json.is_number_integer() || json.get<int64_t>() < least || json.get<int64_t>() > most)
    refuse(key, json, str("a whole number from ", least, " to ", most));
  return json.get<int>();
}

void read_texts(const Json& json, const std::string& at, const char* key, std::vector<std::string>& value) {
  const Json* found = find(json, key);
  if (!found) return;
  const bool is_list =
      found->is_array() && std::all_of(found->begin(), found->end(), [](const Json& item) { return item.is_string(); });
  if (!is_list) refuse(str(at, ".", key), *found, "a list of texts");
  value = found->get<std::vector<std::string>>();
}

bool is_size(const Json& json) {
  return json.is_number_integer() && (json.get<int64_t>() > 0 || json.get<int64_t>() == -1);
}

/// [2, -1] or [[q, kv, kv], -1]: at partition_dim a number of equal matrices, or their sizes.
void read_shape(const Json& shape, const std::string& at, TensorLayerSpec& spec) {
  const std::string key = at + ".shape";
  const int dim = spec.partition_dim.value_or(spec.type == TensorLayerSpec::Type::kRow ? 1 : 0);
  if (!shape.is_array() || shape.empty()) refuse(key, shape, "a list such as [2, -1]");
  if (dim >= static_cast<int>(shape.size())) refuse(key, shape, str("an entry for partition_dim=", dim));
  for (size_t i = 0; i < shape.size(); ++i) {
    const Json& entry = shape[i];
    if (!entry.is_array()) {
      if (!is_size(entry)) refuse(str(key, "[", i, "]"), entry, "a number above 0, -1 or a list of sizes");
      continue;
    }
    if (static_cast<int>(i) != dim)
      refuse(str(key, "[", i, "]"), entry, str("a list of sizes at partition_dim=", dim, " alone"));
    if (entry.empty()) refuse(str(key, "[", i, "]"), entry, "at least one size");
    for (const Json& size : entry)
      if (!is_size(size) || size.get<int64_t>() < 0) refuse(str(key, "[", i, "]"), entry, "numbers above 0");
    spec.sub_sizes = entry.get<std::vector<int64_t>>();
  }
  if (std::count(shape.begin(), shape.end(), Json(-1)) > 1) refuse(key, shape, "at most one -1");
  const Json& last = shape.back();
  if (dim + 1 < static_cast<int>(shape.size()) && last.is_number()) spec.inputs = last.get<int64_t>();
  if (!spec.sub_sizes.empty()) return;
  spec.sub_count = shape[dim].get<int64_t>();
  if (spec.sub_count < 1) refuse(str(key, "[", dim, "]"), shape[dim], "how many matrices there are, at partition_dim");
}

TensorLayerSpec layer_spec_from(const Json& json, const std::string& at) {
  check_keys(
      json, at,
      {"patterns", "partition_type", "shape", "partition_dim", "model_types", "gather_output", "grad_allreduce"});
  TensorLayerSpec spec;
  read_texts(json, at, "patterns", spec.patterns);
  if (spec.patterns.empty()) throw ConfigError(str(at, ".patterns: expected at least one pattern"));
  if (const Json* type = find(json, "partition_type")) {
    if (*type == Json("row"))
      spec.type = TensorLayerSpec::Type::kRow;
    else if (*type == Json("skip"))
      spec.type = TensorLayerSpec::Type::kSkip;
    else if (*type != Json("column"))
      refuse(at + ".partition_type", *type, "column, row or skip");
  }
  if (const Json* dim = find(json, "partition_dim")) spec.partition_dim = whole_of(*dim, at + ".partition_dim", 0, 7);
  read_texts(json, at, "model_types", spec.model_types);
  read_flag(json, at, "gather_output", spec.gather_output);
  read_flag(json, at, "grad_allreduce", spec.grad_allreduce);
  if (const Json* shape = find(json, "shape")) {
    if (spec.gather_output)
      throw ConfigError(str(at,
                            ": gather_output with a shape is not there: the ranks' outputs would be out of order; "
                            "leave one out"),
                        ErrorCode::kUnsupported);
    read_shape(*shape, at, spec);
  }
  return spec;
}

/// The shape that read_shape() reads as `spec` has it; null: none.
Json shape_of(const TensorLayerSpec& spec) {
  if (spec.sub_sizes.empty() && spec.sub_count == 0) return nullptr;
  const int dim = spec.partition_dim.value_or(spec.type == TensorLayerSpec::Type::kRow ? 1 : 0);
  Json shape = Json::array();
  for (int before = 0; before < dim; ++before) shape.push_back(1);
  shape.push_back(spec.sub_sizes.empty() ? Json(spec.sub_count) : Json(spec.sub_sizes));
  if (spec.inputs >= 0) shape.push_back(spec.inputs);
  return shape;
}

Json json_of(const TensorLayerSpec& spec) {
  static constexpr const char* kTypes[] = {"column", "row", "skip"};
  return {{"patterns", spec.patterns},
          {"partition_type", kTypes[static_cast<int>(spec.type)]},
          {"partition_dim", spec.partition_dim ? Json(*spec.partition_dim) : Json()},
          {"shape", shape_of(spec)},
          {"model_types", spec.model_types},
          {"gather_output", spec.gather_output},
          {"grad_allreduce", spec.grad_allreduce}};
}

}  // namespace

Json to_json(const PartitionConfig& config) {
  Json specs = Json::array();
  for (const TensorLayerSpec& spec : config.layer_specs) specs.push_back(json_of(spec));
  return {{"layer_specs", specs},
          {"use_default_specs", config.use_default_specs},
          {"strict_mode", config.strict_mode},
          {"tp_size", config.tp_size},
          {"embedding_partition_dim", config.embedding_partition_dim},
          {"lm_head_patterns", config.lm_head_patterns}};
}

PartitionConfig partition_config_from(const Json& json) {
  check_keys(
      json, kSection,
      {"layer_specs", "use_default_specs", "strict_mode", "tp_size", "embedding_partition_dim", "lm_head_patterns"});
  PartitionConfig config;
  read_flag(json, kSection, "use_default_specs", config.use_default_specs);
  read_flag(json, kSection, "strict_mode", config.strict_mode);
  if (const Json* size = find(json, "tp_size")) config.tp_size = whole_of(*size, str(kSection, ".tp_size"), 0, 100'000);
  if (const Json* dim = find(json, "embedding_partition_dim"))
    config.embedding_partition_dim = whole_of(*dim, str(kSection, ".embedding_partition_dim"), 0, 1);
  read_texts(json, kSection, "lm_head_patterns", config.lm_head_patterns);
  const Json* specs = find(json, "layer_specs");
  if (specs && !specs->is_array()) refuse(str(kSection, ".layer_specs"), *specs, "a list");
  for (size_t i = 0; specs && i < specs->size(); ++i)
    config.layer_specs.push_back(layer_spec_from((*specs)[i], str(kSection, ".layer_specs[", i, "]")));
  return config;
}

namespace tensor {
namespace {

bool is_for(const TensorLayerSpec& spec, const std::string& model_type) {
  const auto lower = [](std::string text) {
    for (char& letter : text) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
    return text;
  };
  return spec.model_types.empty() ||
         std::any_of(spec.model_types.begin(), spec.model_types.end(),
                     [&](const std::string& type) { return lower(type) == lower(model_type); });
}

}  // namespace

RuleSet config_rules(const TensorParallelOptions& options, const PartitionModel& model) {
  const PartitionConfig& config = *options.partition_config;
  RuleSet rules{.source = "partition_config",
                .is_strict = config.strict_mode,
                .embedding_dim = config.embedding_partition_dim,
                .head_patterns = config.lm_head_patterns};
  for (size_t i = 0; i < config.layer_specs.size(); ++i) {
    const TensorLayerSpec& spec = config.layer_specs[i];
    if (!is_for(spec, model.model_type)) continue;
    for (const std::string& pattern : spec.patterns) {
      const std::string key = str("layer_specs[", i, "]");
      Rule rule{.text = str("partition_config.", key, ": ", pattern),
                .matches = pattern_matcher(pattern, str(kSection, ".", key, ".patterns")),
                .dim = spec.partition_dim,
                .sub_sizes = spec.sub_sizes,
                .sub_count = spec.sub_count,
                .inputs = spec.inputs,
                .gathers_output = spec.gather_output,
                .sums_gradient = spec.grad_allreduce,
                .is_needed = true};
      if (spec.type == TensorLayerSpec::Type::kColumn) rule.cutting = Cutting::kColumn;
      if (spec.type == TensorLayerSpec::Type::kRow) rule.cutting = Cutting::kRow;
      rules.rules.push_back(std::move(rule));
    }
  }
  if (!config.use_default_specs || options.preset_model.empty()) return rules;
  RuleSet preset = preset_rules(options.preset_model);
  rules.source += ", then " + preset.source;
  for (Rule& rule : preset.rules) rules.rules.push_back(std::move(rule));
  return rules;
}

}  // namespace tensor
}  // namespace trireme
