// Rules of transformers' plans, of partition_config and of heuristics, which one is taken, and what is refused.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/tensor/families.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/tensor/partition.h"

namespace trireme {
namespace {

using testing::family;
using testing::model_of;
using Plan = std::vector<std::pair<std::string, std::string>>;

const PartitionedParameter& parameter_of(const PartitionPlan& plan, const std::string& ending) {
  for (const PartitionedParameter& parameter : plan.parameters)
    if (parameter.name.ends_with(ending)) return parameter;
  throw std::logic_error(ending);
}

std::vector<Interval> slice(const PartitionPlan& plan, const std::string& ending, size_t rank) {
  return parameter_of(plan, ending).parts.at(rank).intervals;
}

PartitionConfig config_of(const std::string& text) { return partition_config_from(parse_json(text, "test")); }

PartitionPlan config_plan(const PartitionModel& model, const std::string& text, const std::string& preset = "") {
  return make_partition_plan(model, {.autotp_size = 2, .preset_model = preset, .partition_config = config_of(text)});
}

/// The error of `make`.
template <class Make>
std::string refusal(Make make, ErrorCode code = ErrorCode::kConfig) {
  try {
    (void)make();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  return "no error";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

Plan llama_plan() {
  return {{"lm_head", "colwise_gather_output"},           {"model.embed_tokens", "embedding_rowwise"},
          {"model.layers.*.self_attn.q_proj", "colwise"}, {"model.layers.*.self_attn.k_proj", "colwise"},
          {"model.layers.*.self_attn.v_proj", "colwise"}, {"model.layers.*.self_attn.o_proj", "rowwise"},
          {"model.layers.*.mlp.gate_proj", "colwise"},    {"model.layers.*.mlp.up_proj", "colwise"},
          {"model.layers.*.mlp.down_proj", "rowwise"}};
}

PartitionPlan style_plan(const std::string& key, const std::string& style, const std::string& of = "qwen2") {
  return make_partition_plan(model_of(family(of)), {.autotp_size = 2, .tp_plan = {{key, style}}});
}

TEST(TpPlan, OfLlamaCutsAsThePresetDoesAndGathersLogits) {
  const PartitionModel model = model_of(family("llama"));
  const PartitionPlan plan = make_partition_plan(model, {.autotp_size = 3, .tp_plan = llama_plan()});
  const PartitionPlan preset = make_partition_plan(model, {.autotp_size = 3});
  EXPECT_EQ(plan.source, "the model's tp_plan");
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    EXPECT_EQ(plan.parameters[i].parts, preset.parameters[i].parts) << plan.parameters[i].name;
    EXPECT_EQ(plan.parameters[i].kind == PartitionKind::kReplicated,
              preset.parameters[i].kind == PartitionKind::kReplicated);
  }
  EXPECT_EQ(parameter_of(plan, "lm_head.weight").uses.front().output, TensorExchange::kGather);
  EXPECT_EQ(parameter_of(plan, "q_proj.weight").rule, "tp_plan: model.layers.*.self_attn.q_proj, colwise");
}

TEST(TpPlan, ATiedHeadThatGathersIsCutAllTheSame) {
  const PartitionPlan plan =
      make_partition_plan(model_of(family("qwen2")), {.autotp_size = 2, .tp_plan = llama_plan()});
  const PartitionedParameter& embedding = plan.parameters.front();
  EXPECT_EQ(embedding.kind, PartitionKind::kVocabulary);
  EXPECT_EQ(embedding.parts[1].intervals, (std::vector<Interval>{{25, 50}}));
  ASSERT_EQ(embedding.uses.size(), 2u);
  EXPECT_EQ(embedding.uses[0].output, TensorExchange::kAllReduce);
  EXPECT_EQ(embedding.uses[1].output, TensorExchange::kGather);
}

TEST(TpPlan, AKeyWithoutThePrefixOfTheBaseModelNamesTheSame) {
  EXPECT_EQ(parameter_of(style_plan("layers.*.mlp.up_proj", "colwise"), "up_proj.weight").kind, PartitionKind::kColumn);
  EXPECT_EQ(parameter_of(style_plan("layers.0.mlp.up_proj", "colwise"), "up_proj.weight").kind, PartitionKind::kColumn);
  EXPECT_EQ(parameter_of(style_plan("mlp.up_proj", "colwise"), "gate_proj.weight").kind, PartitionKind::kReplicated);
}

/// A style, and what it means for layers.0.mlp.up_proj.weight [40, 24] on the second of two ranks.
struct StyleCase {
  const char* style;
  PartitionKind kind;
  int dim;
  std::vector<Interval> intervals;
  TensorUse use;
  bool sums_gradient = false;
};

TEST(TpPlan, EachStyleMeansWhatItMeansThere) {
  using Exchange = TensorExchange;
  const std::string name = "model.layers.0.mlp.up_proj.weight";
  const TensorUse nothing{.name = name}, column{.name = name, .input_gradient = Exchange::kAllReduce};
  const TensorUse gathered{.name = name,
                           .output = Exchange::kGather,
                           .input_gradient = Exchange::kAllReduce,
                           .output_gradient = Exchange::kSplit};
  const TensorUse row{.name = name, .output = Exchange::kAllReduce};
  const TensorUse split{
      .name = name, .input = Exchange::kSplit, .output = Exchange::kAllReduce, .input_gradient = Exchange::kGather};
  const TensorUse vectors{.name = name, .output = Exchange::kGather, .output_gradient = Exchange::kSplit};
  const std::vector<Interval> outputs = {{20, 40}}, inputs = {{12, 24}};
  const std::vector<StyleCase> cases = {
      {"colwise", PartitionKind::kColumn, 0, outputs, column},
      {"colwise_rep", PartitionKind::kColumn, 0, outputs, gathered},
      {"colwise_gather_output", PartitionKind::kColumn, 0, outputs, gathered},
      {"rowwise", PartitionKind::kRow, 1, inputs, row},
      {"rowwise_rep", PartitionKind::kRow, 1, inputs, split},
      {"rowwise_split_input", PartitionKind::kRow, 1, inputs, split},
      {"packed_colwise", PartitionKind::kPackedColumn, 0, {{10, 20}, {30, 40}}, column},
      {"packed_rowwise", PartitionKind::kPackedRow, 1, {{6, 12}, {18, 24}}, nothing},
      {"embedding_rowwise", PartitionKind::kVocabulary, 0, outputs, row},
      {"embedding_colwise", PartitionKind::kEmbedding, 1, inputs, vectors},
      {"sequence_parallel", PartitionKind::kReplicated, -1, {}, nothing, true},
      {"replicated_with_grad_allreduce", PartitionKind::kReplicated, -1, {}, nothing, true},
      {"replicate", PartitionKind::kReplicated, -1, {}, nothing},
      {"local_colwise", PartitionKind::kColumn, 0, outputs, nothing},
      {"local_rowwise", PartitionKind::kRow, 1, inputs, nothing},
      {"local_packed_rowwise", PartitionKind::kPackedRow, 1, {{6, 12}, {18, 24}}, nothing},
  };
  for (const StyleCase& one : cases) {
    SCOPED_TRACE(one.style);
    const PartitionPlan plan = style_plan("model.layers.*.mlp.up_proj", one.style);
    const PartitionedParameter& up = parameter_of(plan, "up_proj.weight");
    EXPECT_EQ(up.kind, one.kind);
    EXPECT_EQ(up.parts[1], (TensorPart{.shape = {40, 24}, .dim = one.dim, .intervals = one.intervals}));
    EXPECT_EQ(up.uses, std::vector<TensorUse>{one.use});
    EXPECT_EQ(up.sums_gradient, one.sums_gradient);
  }
}

TEST(TpPlan, AStyleOfAModuleStandsWithItsName) {
  for (const char* style : {"all_reduce", "local_params", "gather"}) {
    Plan tp_plan = llama_plan();
    tp_plan.emplace_back("model.layers.*.mlp", style);
    const PartitionPlan plan = make_partition_plan(model_of(family("llama")), {.autotp_size = 2, .tp_plan = tp_plan});
    ASSERT_EQ(plan.modules.size(), 1u) << style;
    EXPECT_EQ(plan.modules[0].name, "model.layers.*.mlp");
    EXPECT_EQ(plan.modules[0].output,
              style == std::string("local_params") ? TensorExchange::kNone : TensorExchange::kAllReduce);
    tp_plan.back().first = "model.layers.*.nothing";
    EXPECT_SAYS(
        refusal([&] { return make_partition_plan(model_of(family("llama")), {.autotp_size = 2, .tp_plan = tp_plan}); }),
        "model.layers.*.nothing");
  }
}

TEST(TpPlan, GatheredOutputsAreCutInTheirOrderWhateverTheHeads) {
  const PartitionPlan plan = make_partition_plan(model_of(family("phi3")),
                                                 {.autotp_size = 3,
                                                  .tp_plan = {{"layers.*.self_attn.qkv_proj", "colwise_gather_output"},
                                                              {"layers.*.self_attn.o_proj", "rowwise_split_input"}}});
  EXPECT_EQ(slice(plan, "qkv_proj.weight", 1), (std::vector<Interval>{{14, 27}}));
  EXPECT_EQ(slice(plan, "o_proj.weight", 1), (std::vector<Interval>{{8, 16}}));
}

TEST(TpPlan, StackedExpertsAreCutInEachExpert) {
  const PartitionPlan plan = make_partition_plan(model_of(family("mixtral")),
                                                 {.autotp_size = 2,
                                                  .tp_plan = {{"layers.*.mlp.experts.gate_up_proj", "packed_colwise"},
                                                              {"layers.*.mlp.experts.down_proj", "rowwise"}}});
  EXPECT_EQ(parameter_of(plan, "experts.gate_up_proj").parts[0].dim, 1);
  EXPECT_EQ(slice(plan, "experts.gate_up_proj", 0), (std::vector<Interval>{{0, 20}, {40, 60}}));
  EXPECT_EQ(parameter_of(plan, "experts.down_proj").parts[0].dim, 2);
}

TEST(TpPlan, StylesThatAreNotThereYetAreRefusedByName) {
  for (const char* style :
       {"mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts"}) {
    const std::string error = refusal([&] { return style_plan("layers.*.mlp", style); }, ErrorCode::kUnsupported);
    EXPECT_SAYS(error, str("=\"", style, "\": this style is not there yet"));
    EXPECT_SAYS(error, "rowwise_split_input");
  }
}

TEST(TpPlan, AnUnknownStyleIsRefusedWithWhatThereIs) {
  const std::string error = refusal([] { return style_plan("layers.*.mlp.up_proj", "colwize"); });
  EXPECT_SAYS(error, "tp_plan[\"layers.*.mlp.up_proj\"]=\"colwize\"");
  EXPECT_SAYS(error, "embedding_rowwise");
  EXPECT_SAYS(error, "Did you mean `colwise`?");
}

TEST(TpPlan, ThatNamesNothingIsRefusedAndOneKeyThatNamesNothingIsNoted) {
  EXPECT_SAYS(refusal([] { return style_plan("layers.*.ffn", "colwise"); }), "model.layers.*.mlp.up_proj.weight");
  Plan tp_plan = llama_plan();
  tp_plan.emplace_back("model.layers.*.ffn", "colwise");
  const PartitionPlan plan = make_partition_plan(model_of(family("llama")), {.autotp_size = 2, .tp_plan = tp_plan});
  ASSERT_EQ(plan.notes.size(), 1u);
  EXPECT_SAYS(plan.notes[0], "tp_plan: model.layers.*.ffn, colwise");
}

// A model in a list of modules has a number of its own before those that "*" stands for.
TEST(TpPlan, AStarIsAnyNumberAndANumberThatOneAlone) {
  PartitionModel model = model_of(family("llama"));
  for (NamedShape& parameter : model.parameters) parameter.name = "models.0." + parameter.name;
  Plan tp_plan = llama_plan();
  for (auto& [key, style] : tp_plan) key = "models.0." + key;
  const PartitionPlan plan = make_partition_plan(model, {.autotp_size = 2, .tp_plan = tp_plan});
  EXPECT_EQ(plan.notes, std::vector<std::string>());
  EXPECT_EQ(parameter_of(plan, "layers.0.self_attn.o_proj.weight").kind, PartitionKind::kRow);
  for (auto& [key, style] : tp_plan) key.replace(0, 8, "models.1");
  EXPECT_SAYS(refusal([&] { return make_partition_plan(model, {.autotp_size = 2, .tp_plan = tp_plan}); }),
              "no rule of the model's tp_plan matches a parameter");
}

constexpr const char* kCustom = R"({
  "use_default_specs": false,
  "layer_specs": [
    {"patterns": [".*\\.o_proj\\.weight$", ".*\\.down_proj\\.weight$"], "partition_type": "row"},
    {"patterns": [".*\\.[qkv]_proj\\.weight$"], "partition_type": "column"},
    {"patterns": [".*\\.(gate|up)_proj\\.weight$"]}]})";

TEST(PartitionConfig, CutsWhatItsPatternsMatchByHeads) {
  const PartitionPlan plan = config_plan(model_of(family("llama")), kCustom);
  EXPECT_EQ(plan.source, "partition_config");
  EXPECT_EQ(slice(plan, "q_proj.weight", 1), (std::vector<Interval>{{12, 24}}));
  EXPECT_EQ(slice(plan, "k_proj.weight", 1), (std::vector<Interval>{{4, 8}}));
  EXPECT_EQ(slice(plan, "down_proj.weight", 1), (std::vector<Interval>{{20, 40}}));
  EXPECT_EQ(parameter_of(plan, "down_proj.weight").parts[1].dim, 1);
  EXPECT_EQ(parameter_of(plan, "up_proj.weight").rule,
            R"(partition_config.layer_specs[2]: .*\.(gate|up)_proj\.weight$)");
}

TEST(PartitionConfig, HasTheDefaultsOfDeepSpeed) {
  const PartitionConfig config = config_of(R"({"layer_specs": [{"patterns": ["a"]}]})");
  EXPECT_TRUE(config.use_default_specs);
  EXPECT_FALSE(config.strict_mode);
  EXPECT_EQ(config.tp_size, 0);
  EXPECT_EQ(config.embedding_partition_dim, 1);
  EXPECT_EQ(config.lm_head_patterns, (std::vector<std::string>{"lm_head", "embed_out"}));
  const TensorLayerSpec& spec = config.layer_specs.at(0);
  EXPECT_EQ(spec.type, TensorLayerSpec::Type::kColumn);
  EXPECT_FALSE(spec.gather_output || spec.grad_allreduce || spec.partition_dim || spec.sub_count);
  EXPECT_TRUE(spec.sub_sizes.empty() && spec.model_types.empty());
}

TEST(PartitionConfig, SubParametersOfEqualAndUnequalSizeAreEachCut) {
  const PartitionModel phi3 = model_of(family("phi3"));
  const PartitionPlan plan = config_plan(phi3, R"({"layer_specs": [
    {"patterns": [".*\\.gate_up_proj\\.weight$"], "shape": [2, -1], "partition_dim": 0},
    {"patterns": [".*\\.qkv_proj\\.weight$"], "shape": [[24, 8, 8], -1], "partition_dim": 0}]})");
  EXPECT_EQ(slice(plan, "gate_up_proj.weight", 1), (std::vector<Interval>{{20, 40}, {60, 80}}));
  EXPECT_EQ(slice(plan, "qkv_proj.weight", 0), (std::vector<Interval>{{0, 12}, {24, 28}, {32, 36}}));
  EXPECT_EQ(slice(plan, "qkv_proj.weight", 1), (std::vector<Interval>{{12, 24}, {28, 32}, {36, 40}}));
}

TEST(PartitionConfig, SubParametersThatSplitHeadsOrDoNotFitAreRefused) {
  const PartitionModel phi3 = model_of(family("phi3"));
  const auto with = [&](const std::string& shape) {
    return refusal([&] {
      return config_plan(phi3,
                         R"({"layer_specs": [{"patterns": [".*\\.qkv_proj\\.weight$"], "shape": )" + shape + "}]}");
    });
  };
  EXPECT_SAYS(with("[3, -1]"), "does not divide by the shape's 3");
  EXPECT_SAYS(with("[[20, 10, 10], -1]"), "6, 2 and 2 heads of one size");
  EXPECT_SAYS(with("[[24, 8], -1]"), "add up to 32, and its dim has 40");
}

TEST(PartitionConfig, AShapeThatIsNoneIsRefused) {
  const auto with = [](const std::string& rest) {
    return refusal([&] { return config_of(R"({"layer_specs": [{"patterns": ["a"], )" + rest + "}]}"); });
  };
  const std::string at = "partition_config.layer_specs[0].shape";
  EXPECT_SAYS(with(R"("shape": [])"), at);
  EXPECT_SAYS(with(R"("shape": [0, -1])"), at + "[0]=0");
  EXPECT_SAYS(with(R"("shape": [-1, -1])"), "at most one -1");
  EXPECT_SAYS(with(R"("shape": [-1, 2])"), "how many matrices");
  EXPECT_SAYS(with(R"("shape": [[], -1])"), "at least one size");
  EXPECT_SAYS(with(R"("shape": [[2, [1]], -1])"), "numbers above 0");
  EXPECT_SAYS(with(R"("shape": [[2, -1], -1])"), "numbers above 0");
  EXPECT_SAYS(with(R"("shape": [-1, [2, 2]])"), "at partition_dim=0 alone");
  EXPECT_SAYS(with(R"("shape": [2, -1], "partition_dim": 2)"), "partition_dim=2");
}

TEST(PartitionConfig, TheLastDimOfAShapeIsThatOfTheWeight) {
  const auto with = [](const char* shape) {
    return config_plan(
        model_of(family("phi3")),
        str(R"({"layer_specs": [{"patterns": [".*\\.gate_up_proj\\.weight$"], "shape": )", shape, "}]}"));
  };
  EXPECT_EQ(slice(with("[2, 24]"), "gate_up_proj.weight", 0), (std::vector<Interval>{{0, 20}, {40, 60}}));
  EXPECT_SAYS(refusal([&] { return with("[2, 25]"); }), "25");
}

TEST(PartitionConfig, KeysAndValuesThatAreUnknownAreRefused) {
  const auto of = [](const char* text) { return refusal([&] { return config_of(text); }); };
  EXPECT_SAYS(of(R"({"layer_spec": []})"), "Did you mean `layer_specs`?");
  EXPECT_SAYS(of(R"({"layer_specs": [{"patterns": ["a"], "partition_typ": "row"}]})"), "layer_specs[0]: unknown key");
  EXPECT_SAYS(of(R"({"layer_specs": [{"patterns": ["a"], "partition_type": "rows"}]})"),
              "expected column, row or skip");
  EXPECT_SAYS(of(R"({"layer_specs": [{"patterns": []}]})"), "layer_specs[0].patterns");
  EXPECT_SAYS(of(R"({"layer_specs": {}})"), "expected a list");
  EXPECT_SAYS(of(R"({"strict_mode": 1})"), "strict_mode=1");
  EXPECT_SAYS(of(R"({"embedding_partition_dim": 2})"), "embedding_partition_dim=2");
  EXPECT_SAYS(of(R"({"lm_head_patterns": "lm_head"})"), "a list of texts");
  EXPECT_SAYS(
      refusal(
          [] {
            return config_of(R"({"layer_specs": [{"patterns": ["a"], "shape": [2, -1], "gather_output": true}]})");
          },
          ErrorCode::kUnsupported),
      "gather_output with a shape");
}

TEST(PartitionConfig, SkipGatherAndGradAllreduceSayWhatIsExchanged) {
  const PartitionPlan plan = config_plan(model_of(family("llama")), R"({"layer_specs": [
    {"patterns": [".*\\.o_proj\\.weight$"], "partition_type": "skip", "grad_allreduce": true},
    {"patterns": [".*\\.up_proj\\.weight$"], "gather_output": true}]})");
  EXPECT_EQ(parameter_of(plan, "o_proj.weight").kind, PartitionKind::kReplicated);
  EXPECT_TRUE(parameter_of(plan, "o_proj.weight").sums_gradient);
  EXPECT_EQ(parameter_of(plan, "up_proj.weight").uses[0].output, TensorExchange::kGather);
}

TEST(PartitionConfig, SpecsOfOtherModelTypesAreLeftOut) {
  const PartitionPlan plan = config_plan(model_of(family("llama")), R"({"layer_specs": [
    {"patterns": [".*\\.qkv_proj\\.weight$"], "model_types": ["phi3"]},
    {"patterns": [".*\\.up_proj\\.weight$"], "model_types": ["LLAMA"]}]})");
  EXPECT_EQ(parameter_of(plan, "up_proj.weight").kind, PartitionKind::kColumn);
}

TEST(PartitionConfig, APatternThatMatchesNothingIsRefusedWithWhatThereIs) {
  const std::string error = refusal([] {
    return config_plan(model_of(family("llama")),
                       R"({"layer_specs": [{"patterns": [".*\\.up_proj\\.weight$", "fc1"]}]})");
  });
  EXPECT_SAYS(error, "layer_specs[0]: fc1 matches no parameter");
  EXPECT_SAYS(error, "model.layers.*.mlp.up_proj.weight");
  EXPECT_SAYS(
      refusal([] { return config_plan(model_of(family("llama")), R"({"layer_specs": [{"patterns": ["(up"]}]})"); }),
      "'(up' is no regular expression");
}

TEST(PartitionConfig, PatternsAreHeldAgainstANamesBeginning) {
  EXPECT_SAYS(
      refusal([] { return config_plan(model_of(family("llama")), R"({"layer_specs": [{"patterns": ["up_proj"]}]})"); }),
      "up_proj matches no parameter");
  EXPECT_EQ(parameter_of(config_plan(model_of(family("llama")), R"({"layer_specs": [{"patterns": [".*up_proj"]}]})"),
                         "up_proj.weight")
                .kind,
            PartitionKind::kColumn);
}

TEST(PartitionConfig, TheFirstPatternThatMatchesSaysHow) {
  const PartitionPlan plan = config_plan(model_of(family("llama")), R"({"layer_specs": [
    {"patterns": [".*up_proj\\.weight$"], "partition_type": "skip"}, {"patterns": [".*(up|gate)_proj\\.weight$"]}]})");
  EXPECT_EQ(parameter_of(plan, "up_proj.weight").kind, PartitionKind::kReplicated);
  EXPECT_EQ(parameter_of(plan, "gate_proj.weight").kind, PartitionKind::kColumn);
}

TEST(PartitionConfig, StrictModeRefusesAMatrixWithoutARule) {
  EXPECT_SAYS(refusal([] {
                return config_plan(model_of(family("llama")),
                                   R"({"strict_mode": true, "layer_specs": [{"patterns": [".*up_proj\\.weight$"]}]})");
              }),
              "no pattern matches `model.layers.0.self_attn.q_proj.weight`");
  std::string strict = kCustom;
  strict.insert(1, R"("strict_mode": true,)");
  EXPECT_EQ(config_plan(model_of(family("llama")), strict).source, "partition_config");
}

TEST(PartitionConfig, EmbeddingsAreCutAlongTheDimItSaysAndTiedOnesOverTokens) {
  const std::string up = R"("layer_specs": [{"patterns": [".*up_proj\\.weight$"]}])";
  const PartitionPlan vectors = config_plan(model_of(family("llama")), "{" + up + "}");
  EXPECT_EQ(vectors.parameters.front().kind, PartitionKind::kEmbedding);
  EXPECT_EQ(vectors.parameters.front().parts[1], (TensorPart{{50, 24}, 1, {{12, 24}}}));
  EXPECT_EQ(vectors.parameters.front().uses[0].output, TensorExchange::kGather);
  const PartitionPlan tokens = config_plan(model_of(family("llama")), R"({"embedding_partition_dim": 0, )" + up + "}");
  EXPECT_EQ(tokens.parameters.front().parts[1], (TensorPart{{50, 24}, 0, {{25, 50}}}));
  const PartitionPlan tied = config_plan(model_of(family("qwen2")), "{" + up + "}");
  EXPECT_EQ(tied.parameters.front().kind, PartitionKind::kVocabulary);
}

TEST(PartitionConfig, HeadsAreKnownByTheirPatterns) {
  const std::string up = R"("layer_specs": [{"patterns": [".*up_proj\\.weight$"]}])";
  EXPECT_EQ(parameter_of(config_plan(model_of(family("llama")), "{" + up + "}"), "lm_head.weight").kind,
            PartitionKind::kVocabulary);
  EXPECT_EQ(parameter_of(config_plan(model_of(family("llama")), R"({"lm_head_patterns": ["score"], )" + up + "}"),
                         "lm_head.weight")
                .kind,
            PartitionKind::kReplicated);
}

TEST(PartitionConfig, ASizeThatContradictsAutotpSizeIsRefused) {
  TensorParallelOptions options{.autotp_size = 2, .partition_config = config_of(kCustom)};
  options.partition_config->tp_size = 4;
  EXPECT_SAYS(refusal([&] { return make_partition_plan(model_of(family("llama")), options); }), "tp_size=4");
  options.autotp_size = 0;
  EXPECT_EQ(make_partition_plan(model_of(family("llama")), options).ranks, 4);
}

TEST(Priority, PartitionConfigGoesBeforeTheModelsPlanAndThatBeforeAPreset) {
  const PartitionModel model = model_of(family("llama"));
  TensorParallelOptions options{
      .autotp_size = 2, .preset_model = "llama", .partition_config = config_of(kCustom), .tp_plan = llama_plan()};
  PartitionPlan plan = make_partition_plan(model, options);
  EXPECT_EQ(plan.source, "partition_config");
  ASSERT_EQ(plan.notes.size(), 2u);
  EXPECT_SAYS(plan.notes[0], "tp_plan is not used");
  EXPECT_SAYS(plan.notes[1], "use_default_specs is false");
  options.partition_config.reset();
  plan = make_partition_plan(model, options);
  EXPECT_EQ(plan.source, "the model's tp_plan");
  ASSERT_EQ(plan.notes.size(), 1u);
  EXPECT_SAYS(plan.notes[0], "preset_model=llama is not used");
  options.tp_plan.clear();
  EXPECT_EQ(make_partition_plan(model, options).source, "preset llama");
  options.preset_model = "nobody";
  options.tp_plan = llama_plan();
  EXPECT_SAYS(refusal([&] { return make_partition_plan(model, options); }), "preset_model=\"nobody\"");
}

TEST(Priority, OwnSpecsStandBeforeThoseOfThePreset) {
  const PartitionPlan plan =
      config_plan(model_of(family("llama")),
                  R"({"layer_specs": [{"patterns": [".*\\.up_proj\\.weight$"], "partition_type": "skip"}]})", "llama");
  EXPECT_EQ(plan.source, "partition_config, then preset llama");
  EXPECT_EQ(parameter_of(plan, "up_proj.weight").kind, PartitionKind::kReplicated);
  EXPECT_EQ(parameter_of(plan, "gate_proj.weight").kind, PartitionKind::kColumn);
}

PartitionPlan guess(const std::string& of, const std::string& model_type = "") {
  PartitionModel model = model_of(family(of));
  model.model_type = model_type;
  return make_partition_plan(model, {.autotp_size = 2});
}

TEST(Heuristics, CutAsThePresetsOfFamiliesWhoseWeightsAreOutputsByInputs) {
  for (const char* name : {"llama", "qwen2", "gemma", "opt", "bloom", "gpt_neox", "falcon"}) {
    const PartitionPlan plan = guess(name);
    const PartitionPlan preset = make_partition_plan(model_of(family(name)), {.autotp_size = 2});
    EXPECT_EQ(plan.source, "heuristics");
    for (size_t i = 0; i < plan.parameters.size(); ++i)
      EXPECT_EQ(plan.parameters[i].parts, preset.parameters[i].parts) << name << ": " << plan.parameters[i].name;
  }
}

TEST(Heuristics, TakeAMatrixBeforeANormForARow) {
  const PartitionPlan plan = guess("bert");
  EXPECT_EQ(parameter_of(plan, "attention.output.dense.weight").kind, PartitionKind::kRow);
  EXPECT_EQ(parameter_of(plan, "0.output.dense.weight").kind, PartitionKind::kRow);
  EXPECT_EQ(parameter_of(plan, "intermediate.dense.weight").kind, PartitionKind::kColumn);
}

TEST(Heuristics, DoNotReadAnOrderOffNamesThatHaveNone) {
  PartitionModel model = model_of(family("bert"));
  model.model_type = "";
  model.is_ordered = false;
  EXPECT_SAYS(refusal([&] { return make_partition_plan(model, {.autotp_size = 2}); }),
              "bert.encoder.layer.0, beside attention");
}

TEST(Heuristics, LeaveRoutersAndWhatIsInNoBlockWhole) {
  EXPECT_EQ(parameter_of(guess("mixtral"), "1.block_sparse_moe.gate.weight").kind, PartitionKind::kReplicated);
  EXPECT_EQ(parameter_of(guess("bert"), "transform.dense.weight").kind, PartitionKind::kReplicated);
}

TEST(Heuristics, RefuseFamiliesThatTheyCannotKnowAndBlocksWithoutARow) {
  for (const char* type : {"deberta", "flaubert", "fsmt", "led", "longformer", "xlm", "xlnet"})
    EXPECT_SAYS(refusal([&] { return guess("bert", type); }, ErrorCode::kUnsupported), type);
  const PartitionModel model{.heads = 2, .parameters = {{.name = "layers.0.a.weight", .shape = {4, 4}}}};
  EXPECT_SAYS(refusal([&] { return make_partition_plan(model, {.autotp_size = 2}); }), "layers.0");
  const PartitionModel flat{.heads = 2, .parameters = {{.name = "a.weight", .shape = {4, 4}}}};
  EXPECT_SAYS(refusal([&] { return make_partition_plan(flat, {.autotp_size = 2}); }), "no numbered blocks");
}

TEST(Heuristics, TakeLayersOfASequenceForBlocksWhereTheyHaveLayers) {
  const PartitionModel model{.parameters = {{.name = "0.weight", .shape = {4, 4}},
                                            {.name = "1.mlp.fc1.weight", .shape = {8, 4}},
                                            {.name = "1.mlp.fc2.weight", .shape = {4, 8}}}};
  const PartitionPlan plan = make_partition_plan(model, {.autotp_size = 2});
  EXPECT_EQ(parameter_of(plan, "0.weight").kind, PartitionKind::kReplicated);
  EXPECT_EQ(parameter_of(plan, "1.mlp.fc1.weight").kind, PartitionKind::kColumn);
  EXPECT_EQ(parameter_of(plan, "1.mlp.fc2.weight").kind, PartitionKind::kRow);
}

TEST(Heuristics, RefuseAnAttentionWithoutARowBesideAnMlpThatHasOne) {
  PartitionModel model = model_of(family("llama"));
  model.model_type = "";
  for (NamedShape& parameter : model.parameters)
    if (const size_t place = parameter.name.find("o_proj"); place != std::string::npos)
      parameter.name.replace(place, 6, "merge");
  EXPECT_SAYS(refusal([&] { return make_partition_plan(model, {.autotp_size = 2}); }), "model.layers.0, attention");
}

TEST(Heuristics, CutEachOfTwoMatricesInOneAndRefuseWhatNoRowTakes) {
  PartitionModel model = model_of(family("llama"));
  model.model_type = "";
  NamedShape& up = model.parameters[6];
  up = {.name = "model.layers.0.mlp.gate_up_proj.weight", .shape = {80, 24}};
  EXPECT_EQ(slice(make_partition_plan(model, {.autotp_size = 2}), "gate_up_proj.weight", 1),
            (std::vector<Interval>{{20, 40}, {60, 80}}));
  up.name = "model.layers.0.mlp.both.weight";
  EXPECT_SAYS(refusal([&] { return make_partition_plan(model, {.autotp_size = 2}); }), "80 features of `" + up.name);
  up = {.name = "model.layers.0.self_attn.in_proj.weight", .shape = {72, 24}};
  EXPECT_SAYS(refusal([&] { return make_partition_plan(model, {.autotp_size = 2}); }),
              "which heads are in `" + up.name);
}

TEST(PartitionConfig, AnAttentionsKeysAndValuesInOneMatrixNeedAShape) {
  PartitionModel model = model_of(family("llama"));
  model.parameters.push_back({.name = "model.layers.0.self_attn.kv_proj.weight", .shape = {16, 24}});
  const auto with = [&](const std::string& shape) {
    return config_plan(model, R"({"layer_specs": [{"patterns": [".*kv_proj\\.weight$"])" + shape + "}]}");
  };
  EXPECT_SAYS(refusal([&] { return with(""); }), "give a shape");
  TensorParallelOptions options{.autotp_size = 3, .partition_config = config_of(R"({"layer_specs": [
    {"patterns": [".*kv_proj\\.weight$"], "shape": [2, -1]}]})")};  // ranks 0 and 1 share a head
  const PartitionPlan plan = make_partition_plan(model, options);
  EXPECT_EQ(slice(plan, "kv_proj.weight", 1), (std::vector<Interval>{{0, 4}, {8, 12}}));
  EXPECT_EQ(slice(plan, "kv_proj.weight", 2), (std::vector<Interval>{{4, 8}, {12, 16}}));
}

TEST(PartitionConfig, AnAttentionsLayerOfAnotherNameIsCutByHeads) {
  PartitionModel model = model_of(family("llama"));
  model.parameters.push_back({.name = "model.layers.0.self_attn.g_proj.weight", .shape = {6, 24}});
  const std::string text = R"({"layer_specs": [{"patterns": [".*g_proj\\.weight$"]}]})";
  EXPECT_EQ(slice(config_plan(model, text), "g_proj.weight", 1), (std::vector<Interval>{{3, 6}}));
  model.parameters.back().shape[0] = 7;
  EXPECT_SAYS(refusal([&] { return config_plan(model, text); }), "does not divide by 6 attention heads");
}

TEST(Heuristics, ARouterAddsUpItsGradientWhereItsExpertsAreCut) {
  EXPECT_TRUE(parameter_of(guess("mixtral"), "1.block_sparse_moe.gate.weight").sums_gradient);
  EXPECT_FALSE(parameter_of(guess("mixtral"), "0.mlp.gate.weight").sums_gradient);
}

TEST(HeadNorms, AddUpTheirGradientAndAreRefusedOverAllHeads) {
  PartitionModel model = model_of(family("llama"));
  model.parameters.push_back({.name = "model.layers.0.self_attn.q_norm.weight", .shape = {4}});
  const PartitionPlan plan = make_partition_plan(model, {.autotp_size = 2});
  EXPECT_TRUE(plan.parameters.back().sums_gradient);
  EXPECT_EQ(plan.parameters.back().kind, PartitionKind::kReplicated);
  model.parameters.back().shape = {24};
  EXPECT_SAYS(refusal([&] { return make_partition_plan(model, {.autotp_size = 2}); }, ErrorCode::kUnsupported),
              "model.layers.0.self_attn.q_norm.weight");
}

/// `model` inside of peft's: LoRA beside each matrix of an attention, and its head saved as a whole.
PartitionModel adapted(const PartitionModel& model) {
  PartitionModel result = model;
  result.parameters.clear();
  const auto add = [&](const std::string& name, const std::vector<int64_t>& shape) {
    result.parameters.push_back({.name = "base_model.model." + name, .shape = shape});
  };
  for (const NamedShape& parameter : model.parameters) {
    const std::string& name = parameter.name;
    const std::string layer = name.substr(0, name.rfind('.')), leaf = name.substr(layer.size());
    if (name.find("attn") != std::string::npos && parameter.shape.size() == 2) {
      add(layer + ".base_layer" + leaf, parameter.shape);
      add(layer + ".lora_A.default.weight", {4, parameter.shape[1]});
      add(layer + ".lora_B.default.weight", {parameter.shape[0], 4});
      add(layer + ".lora_magnitude_vector.default.weight", {parameter.shape[0]});
    } else if (name == "lm_head.weight") {
      add(layer + ".original_module" + leaf, parameter.shape);
      add(layer + ".modules_to_save.default" + leaf, parameter.shape);
    } else {
      add(name, parameter.shape);
    }
  }
  return result;
}

/// The plan of adapted(model) cuts what `model`'s cuts, alike, and no adapter.
void expect_seen_through(const PartitionModel& model, const TensorParallelOptions& options) {
  const PartitionPlan plain = make_partition_plan(model, options), plan = make_partition_plan(adapted(model), options);
  ASSERT_EQ(plan.parameters.size(), adapted(model).parameters.size());
  EXPECT_EQ(plan.source, plain.source);
  size_t adapters = 0, heads = 0;
  for (size_t i = 0; i < plan.parameters.size(); ++i) {
    const PartitionedParameter& one = plan.parameters[i];
    EXPECT_EQ(one.name, adapted(model).parameters[i].name);
    EXPECT_EQ(one.uses.front().name, one.name);
    std::string name = one.name.substr(std::string("base_model.model.").size());
    if (name.find(".lora_") != std::string::npos) {
      ++adapters;
      EXPECT_EQ(one.kind, PartitionKind::kReplicated) << name;
      EXPECT_EQ(one.parts, std::vector<TensorPart>(2, {.shape = adapted(model).parameters[i].shape})) << name;
      EXPECT_SAYS(one.rule, "adapter of base_model.model.");
      continue;
    }
    heads += name.starts_with("lm_head");
    for (const std::string wrapper : {".base_layer", ".original_module", ".modules_to_save.default"})
      if (const size_t at = name.find(wrapper); at != std::string::npos) name.erase(at, wrapper.size());
    const PartitionedParameter& expected = parameter_of(plain, name);
    EXPECT_EQ(one.kind, expected.kind) << name;
    EXPECT_EQ(one.parts, expected.parts) << name;
    EXPECT_EQ(one.rule, expected.rule) << name;
    EXPECT_EQ(one.sums_gradient, expected.sums_gradient) << name;
  }
  EXPECT_GT(adapters, 0u);
  EXPECT_EQ(heads, 2u);
}

TEST(Peft, LayersAreCutAsWithoutItAndAdaptersAreWhole) {
  PartitionModel model = model_of(family("llama"));
  expect_seen_through(model, {.autotp_size = 2});
  expect_seen_through(model, {.autotp_size = 2, .tp_plan = llama_plan()});
  Plan placed;  // as a model of transformers inside of peft's tells it
  for (const auto& [key, style] : llama_plan()) placed.emplace_back("base_model.model." + key, style);
  const PartitionPlan plan = make_partition_plan(adapted(model), {.autotp_size = 2, .tp_plan = placed});
  EXPECT_EQ(slice(plan, "q_proj.base_layer.weight", 1), (std::vector<Interval>{{12, 24}}));
  expect_seen_through(model, {.autotp_size = 2, .partition_config = config_of(R"({"layer_specs": [
    {"patterns": ["model\\.layers\\.\\d+\\.self_attn\\.q_proj"]}, {"patterns": [".*o_proj\\.weight$"], "partition_type": "row"}]})")});
  model.model_type = "";
  expect_seen_through(model, {.autotp_size = 2});
}

TEST(PartitionText, SaysRuleSlicesExchangesAndWhy) {
  const std::string text = partition_text(make_partition_plan(model_of(family("llama")), {.autotp_size = 3}));
  EXPECT_SAYS(text, "tensor axis of 3 ranks; rules of preset llama, by model_type");
  EXPECT_SAYS(text, R"(  model.layers.0.self_attn.q_proj.weight [24, 24]
    cut        column; whole query heads, of 6
    rule       preset llama: .*\.self_attn\.[qkv]_proj\.weight$
    rank 0     dim 0: 0-8, [8, 24]
    rank 1     dim 0: 8-12, [4, 24]
    rank 2     dim 0: 12-24, [12, 24]
    exchanges  all-reduce of the input's gradient
)");
  EXPECT_SAYS(text, "added up over the ranks that have the same elements");
}

TEST(PartitionText, CountsLikeParametersOfSeveralLayers) {
  PartitionModel model = model_of(family("llama"));
  for (const size_t i : {1, 2}) {
    NamedShape copy = model.parameters[i];
    copy.name.replace(copy.name.find(".0."), 3, ".1.");
    model.parameters.push_back(copy);
  }
  EXPECT_SAYS(partition_text(make_partition_plan(model, {.autotp_size = 2})),
              "  model.layers.*.self_attn.q_proj.weight [24, 24], 2 of them\n");
}

}  // namespace
}  // namespace trireme
