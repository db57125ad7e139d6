#include <algorithm>
#include <cctype>

#include "tensor/rules.h"
#include "trireme/base/error.h"
#include "trireme/base/name_pattern.h"
#include "trireme/base/suggest.h"

namespace trireme::tensor {
namespace {

struct PresetRow {
  const char* pattern;
  Cutting cutting;
  std::optional<Units> units = std::nullopt;
  bool is_transposed = false;
  int64_t sub_count = 0;
  bool sums_gradient = false;
  const char* why = "";
  bool exchanges = true;
};

constexpr auto kNone = Cutting::kNone;
constexpr auto kColumn = Cutting::kColumn;
constexpr auto kRow = Cutting::kRow;

std::vector<PresetRow> operator+(std::vector<PresetRow> rows, const std::vector<PresetRow>& more) {
  rows.insert(rows.end(), more.begin(), more.end());
  return rows;
}

const std::vector<PresetRow> kAttentionLlama = {
    {R"(.*\.self_attn\.o_proj\.weight$)", kRow},
    {R"(.*\.self_attn\.[qkv]_proj\.weight$)", kColumn},
};
const std::vector<PresetRow> kGatedMlp = {
    {R"(.*\.mlp\.down_proj\.weight$)", kRow},
    {R"(.*\.mlp\.(up|gate)_proj\.weight$)", kColumn},
};
// Experts as one tensor each for all of a layer: [experts, outputs, inputs].
const std::vector<PresetRow> kStackedExperts = {
    {R"(.*\.mlp\.experts\.down_proj$)", kRow},
    {.pattern = R"(.*\.mlp\.experts\.gate_up_proj$)", .cutting = kColumn, .sub_count = 2},
    {.pattern = R"(.*\.mlp\.gate\.weight$)", .cutting = kNone, .sums_gradient = true, .why = kRouterWhy},
};
// A key/value head's queries, key and value stand together: Bloom, GPT-NeoX and Falcon.
std::vector<PresetRow> bloom_like(const char* qkv, const char* dense) {
  return {{dense, kRow},
          {R"(.*\.mlp\.dense_4h_to_h\.weight$)", kRow},
          {qkv, kColumn, Units::kGroupedQkv},
          {R"(.*\.mlp\.dense_h_to_4h\.weight$)", kColumn}};
}

struct Preset {
  const char* name;
  std::vector<PresetRow> rows;
};

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = {
      {"llama", kAttentionLlama + kGatedMlp},
      {"bloom", bloom_like(R"(.*\.self_attention\.query_key_value\.weight$)", R"(.*\.self_attention\.dense\.weight$)")},
      {"chatglm",
       {{R"(.*\.self_attention\.dense\.weight$)", kRow},
        {R"(.*\.mlp\.dense_4h_to_h\.weight$)", kRow},
        {R"(.*\.self_attention\.query_key_value\.weight$)", kColumn, Units::kStackedQkv},
        {.pattern = R"(.*\.mlp\.dense_h_to_4h\.weight$)", .cutting = kColumn, .sub_count = 2},
        {R"(.*\.output_layer\.weight$)", Cutting::kHead}}},
      {"mixtral", kAttentionLlama +
                      std::vector<PresetRow>{
                          {R"(.*\.block_sparse_moe\.experts\.\d+\.w2\.weight$)", kRow},
                          {R"(.*\.block_sparse_moe\.experts\.\d+\.w[13]\.weight$)", kColumn},
                          {.pattern = R"(.*\.block_sparse_moe\.gate\.weight$)",
                           .cutting = kNone,
                           .sums_gradient = true,
                           .why = kRouterWhy},
                      } +
                      kStackedExperts},
      {"deepseek_v2",
       std::vector<PresetRow>{
           {R"(.*\.self_attn\.o_proj\.weight$)", kRow},
           {.pattern = R"(.*\.self_attn\.q_a_proj\.weight$)",
            .cutting = kNone,
            .why = "makes what all heads of queries are made of"},
           {.pattern = R"(.*\.self_attn\.kv_a_proj_with_mqa\.weight$)",
            .cutting = kNone,
            .why = "makes what all heads are made of, and one key that all heads share: each rank has a part of that "
                   "key's gradient"},
           {R"(.*\.self_attn\.(q_proj|q_b_proj|kv_b_proj)\.weight$)", kColumn, Units::kHeads},
           {R"(.*\.mlp\.experts\.\d+\.down_proj\.weight$)", kRow},
           {R"(.*\.mlp\.experts\.\d+\.(up|gate)_proj\.weight$)", kColumn},
           {R"(.*\.mlp\.shared_experts\.down_proj\.weight$)", kRow},
           {R"(.*\.mlp\.shared_experts\.(up|gate)_proj\.weight$)", kColumn},
       } + kStackedExperts +
           kGatedMlp},
      {"qwen2", kAttentionLlama + kGatedMlp},
      {"phi3",
       {{R"(.*\.self_attn\.o_proj\.weight$)", kRow},
        {R"(.*\.mlp\.down_proj\.weight$)", kRow},
        {R"(.*\.self_attn\.qkv_proj\.weight$)", kColumn, Units::kStackedQkv},
        {.pattern = R"(.*\.mlp\.gate_up_proj\.weight$)", .cutting = kColumn, .sub_count = 2}}},
      {"gpt2",
       {{R"((.*\.)?attn\.c_proj\.weight$)", kRow, Units::kHeads, true},
        {R"((.*\.)?mlp\.c_proj\.weight$)", kRow, Units::kFeatures, true},
        {R"((.*\.)?attn\.c_attn\.weight$)", kColumn, Units::kStackedQkv, true},
        {R"((.*\.)?mlp\.c_fc\.weight$)", kColumn, Units::kFeatures, true}}},
      {"gpt_neox", bloom_like(R"(.*\.attention\.query_key_value\.weight$)", R"(.*\.attention\.dense\.weight$)")},
      {"opt",
       {{R"(.*\.self_attn\.out_proj\.weight$)", kRow},
        {R"(.*\.fc2\.weight$)", kRow},
        {R"(.*\.self_attn\.[qkv]_proj\.weight$)", kColumn},
        {R"(.*\.fc1\.weight$)", kColumn}}},
      {"gemma", kAttentionLlama + kGatedMlp},
      {"falcon",
       bloom_like(R"(.*\.self_attention\.query_key_value\.weight$)", R"(.*\.self_attention\.dense\.weight$)")},
      {"bert",
       {{R"(.*\.attention\.output\.dense\.weight$)", kRow},
        {R"(.*\.layer\.\d+\.output\.dense\.weight$)", kRow},
        {R"(.*\.attention\.self\.(query|key|value)\.weight$)", kColumn},
        {R"(.*\.intermediate\.dense\.weight$)", kColumn},
        {R"(cls\.predictions\.(decoder|bias)(\.weight|\.bias)?$)", Cutting::kHead}}},
      {"t5",
       {{R"(.*\.(SelfAttention|EncDecAttention)\.o\.weight$)", kRow},
        {R"(.*\.DenseReluDense\.wo\.weight$)", kRow},
        {R"(.*\.(SelfAttention|EncDecAttention)\.[qkv]\.weight$)", kColumn},
        {.pattern = R"(.*\.SelfAttention\.relative_attention_bias\.weight$)",
         .cutting = kColumn,
         .units = Units::kHeads,
         .is_transposed = true,
         .exchanges = false},
        {R"(.*\.DenseReluDense\.wi(_[01])?\.weight$)", kColumn},
        {R"(shared\.weight$)", Cutting::kVocabulary}}},
  };
  return all;
}

std::string lower(std::string text) {
  for (char& letter : text) letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  return text;
}

}  // namespace

std::function<bool(const std::string&)> pattern_matcher(const std::string& pattern, const std::string& key) {
  return [compiled = NamePattern(pattern, key)](const std::string& name) { return compiled.begins(name); };
}

bool has_preset(const std::string& model_type) {
  const std::vector<std::string>& names = preset_names();
  return std::find(names.begin(), names.end(), lower(model_type)) != names.end();
}

RuleSet preset_rules(const std::string& name) {
  for (const Preset& preset : presets()) {
    if (lower(name) != preset.name) continue;
    RuleSet rules{.source = str("preset ", preset.name)};
    for (const PresetRow& row : preset.rows)
      rules.rules.push_back({.text = str("preset ", preset.name, ": ", row.pattern),
                             .matches = pattern_matcher(row.pattern, "preset_model"),
                             .cutting = row.cutting,
                             .units = row.units,
                             .is_transposed = row.is_transposed,
                             .sub_count = row.sub_count,
                             .sums_gradient = row.sums_gradient,
                             .exchanges = row.exchanges,
                             .why = row.why});
    return rules;
  }
  std::string names;
  for (const std::string& one : preset_names()) names += (names.empty() ? "" : ", ") + one;
  throw ConfigError(str("tensor_parallel.preset_model=\"", name, "\": unknown; there are ", names, ".",
                        did_you_mean(name, preset_names())));
}

}  // namespace trireme::tensor

namespace trireme {

const std::vector<std::string>& preset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const auto& preset : tensor::presets()) all.emplace_back(preset.name);
    return all;
  }();
  return names;
}

}  // namespace trireme
