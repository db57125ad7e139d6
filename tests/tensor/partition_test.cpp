// Plans of all families are held against what a cut means: nothing lost, nothing twice, nobody idle, no head in two.
#include "trireme/tensor/partition.h"

#include <gtest/gtest.h>

#include <algorithm>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/tensor/families.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using testing::families;
using testing::family;
using testing::Family;
using testing::model_of;

PartitionPlan preset_plan(const Family& family, int ranks) {
  return make_partition_plan(model_of(family), {.autotp_size = ranks, .preset_model = family.preset});
}

const PartitionedParameter& find(const PartitionPlan& plan, const std::string& ending) {
  for (const PartitionedParameter& parameter : plan.parameters)
    if (parameter.name.ends_with(ending)) return parameter;
  throw std::logic_error(ending);
}

/// The indices of the dim that is cut; all of a dim of `extent` where none is.
std::vector<int64_t> indices(const TensorPart& part, int64_t extent) {
  std::vector<int64_t> all;
  for (const Interval& interval : part.dim < 0 ? std::vector<Interval>{{0, extent}} : part.intervals)
    for (int64_t i = interval.begin; i < interval.end; ++i) all.push_back(i);
  return all;
}

int cut_dim(const PartitionedParameter& parameter) {
  for (const TensorPart& part : parameter.parts)
    if (part.dim >= 0) return part.dim;
  return 0;
}

std::vector<Interval> intervals(const PartitionedParameter& parameter, int rank) {
  return parameter.parts[static_cast<size_t>(rank)].intervals;
}

std::string error_of(const PartitionModel& model, const TensorParallelOptions& options) {
  try {
    (void)make_partition_plan(model, options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

#define EXPECT_TEXT(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Partition, EveryElementIsOnARankAndTwiceOnlyWhereRanksShareAKeyValueHead) {
  for (const Family& family : families()) {
    for (int ranks = 1; ranks <= 6; ++ranks) {
      for (const PartitionedParameter& parameter : preset_plan(family, ranks).parameters) {
        SCOPED_TRACE(str(parameter.name, " of ", family.preset, " on ", ranks, " ranks"));
        ASSERT_EQ(parameter.parts.size(), static_cast<size_t>(ranks));
        const int dim = cut_dim(parameter);
        const int64_t extent = parameter.parts.front().shape[dim];
        std::map<int64_t, int> copies;
        for (const TensorPart& part : parameter.parts) {
          EXPECT_EQ(part_problem(part), "");
          EXPECT_GT(local_numel(part), 0);
          for (const int64_t index : indices(part, extent)) ++copies[index];
        }
        EXPECT_EQ(copies.size(), static_cast<size_t>(extent));
        if (parameter.kind == PartitionKind::kReplicated) continue;
        const bool is_of_key_values = parameter.name.find("k_proj") != std::string::npos ||
                                      parameter.name.find("v_proj") != std::string::npos ||
                                      parameter.name.find("query_key_value") != std::string::npos ||
                                      parameter.name.find("qkv") != std::string::npos;
        const bool is_shared = is_of_key_values && ranks > family.key_value_heads;
        const bool is_any_twice =
            std::any_of(copies.begin(), copies.end(), [](const auto& one) { return one.second > 1; });
        EXPECT_EQ(is_any_twice, is_shared);
        EXPECT_EQ(parameter.sums_gradient, is_shared);
      }
    }
  }
}

TEST(Partition, ARankTakesWhatItMakes) {
  for (const Family& family : families()) {
    for (int ranks = 2; ranks <= 6; ++ranks) {
      const PartitionPlan plan = preset_plan(family, ranks);
      for (const testing::Pair& pair : family.pairs) {
        SCOPED_TRACE(str(pair.column, " and ", pair.row, " of ", family.preset, " on ", ranks, " ranks"));
        const PartitionedParameter &column = find(plan, pair.column), &row = find(plan, pair.row);
        const int64_t outputs = column.parts[0].shape[cut_dim(column)], inputs = row.parts[0].shape[cut_dim(row)];
        ASSERT_EQ(outputs % (pair.count * pair.matrices), 0);
        ASSERT_EQ(inputs % pair.count, 0);
        const int64_t matrix = outputs / pair.matrices;
        for (int rank = 0; rank < ranks; ++rank) {
          std::map<int64_t, int64_t> made, taken;  // elements of each head
          for (const int64_t index : indices(column.parts[rank], outputs))
            ++made[index % matrix / (matrix / pair.count)];
          for (const int64_t index : indices(row.parts[rank], inputs)) ++taken[index / (inputs / pair.count)];
          ASSERT_EQ(made.size(), taken.size());
          for (const auto& [head, count] : made) {
            EXPECT_EQ(count, outputs / pair.count);
            EXPECT_EQ(taken[head], inputs / pair.count);
          }
        }
      }
    }
  }
}

TEST(Partition, QueryHeadsGoWithTheirKeyValueHead) {
  for (int ranks = 2; ranks <= 6; ++ranks) {
    const PartitionPlan plan = preset_plan(family("llama"), ranks);
    for (int rank = 0; rank < ranks; ++rank) {
      std::set<int64_t> of_queries, of_keys;
      for (const int64_t index : indices(find(plan, "q_proj.weight").parts[rank], 24)) of_queries.insert(index / 12);
      for (const int64_t index : indices(find(plan, "k_proj.weight").parts[rank], 8)) of_keys.insert(index / 4);
      EXPECT_EQ(of_queries, of_keys) << rank << " of " << ranks;
    }
  }
}

TEST(Partition, UnevenHeadsAndMoreRanksThanKeyValueHeadsFollowTheClosedForm) {
  const PartitionPlan plan = preset_plan(family("llama"), 3);  // key/value head 0 has two ranks, head 1 one
  const PartitionedParameter &q = find(plan, "q_proj.weight"), &k = find(plan, "k_proj.weight");
  EXPECT_EQ(intervals(q, 0), (std::vector<Interval>{{0, 8}}));
  EXPECT_EQ(intervals(q, 1), (std::vector<Interval>{{8, 12}}));
  EXPECT_EQ(intervals(q, 2), (std::vector<Interval>{{12, 24}}));
  EXPECT_EQ(intervals(k, 0), (std::vector<Interval>{{0, 4}}));
  EXPECT_EQ(k.parts[0], k.parts[1]);
  EXPECT_EQ(intervals(k, 2), (std::vector<Interval>{{4, 8}}));
  EXPECT_TRUE(k.sums_gradient);
  EXPECT_FALSE(q.sums_gradient);
}

TEST(Partition, KeyValueHeadsThatAreNotSharedEvenlyTakeTheirQueryHeadsWithThem) {
  PartitionModel model = model_of(family("llama"));
  model.key_value_heads = 3;
  for (NamedShape& parameter : model.parameters)
    if (parameter.shape.front() == 8) parameter.shape.front() = 12;
  const PartitionPlan plan = make_partition_plan(model, {.autotp_size = 2});
  EXPECT_EQ(intervals(find(plan, "k_proj.weight"), 0), (std::vector<Interval>{{0, 8}}));
  EXPECT_EQ(intervals(find(plan, "q_proj.weight"), 0), (std::vector<Interval>{{0, 16}}));
  EXPECT_EQ(intervals(find(plan, "o_proj.weight"), 1), (std::vector<Interval>{{16, 24}}));
}

TEST(Partition, OneKeyValueHeadIsWholeOnEachRank) {
  const PartitionedParameter k = find(preset_plan(family("gemma"), 4), "k_proj.weight");
  for (const TensorPart& part : k.parts) EXPECT_EQ(part, (TensorPart{.shape = {8, 24}}));
  EXPECT_EQ(k.kind, PartitionKind::kColumn);
  EXPECT_TRUE(k.sums_gradient);
}

TEST(Partition, StackedQkvHasThreeIntervals) {
  const PartitionedParameter gpt2 = find(preset_plan(family("gpt2"), 2), "c_attn.weight");
  EXPECT_EQ(gpt2.kind, PartitionKind::kPackedColumn);
  EXPECT_EQ(gpt2.parts[1].dim, 1);
  EXPECT_EQ(intervals(gpt2, 1), (std::vector<Interval>{{12, 24}, {36, 48}, {60, 72}}));
  const PartitionedParameter phi3 = find(preset_plan(family("phi3"), 2), "qkv_proj.weight");
  EXPECT_EQ(phi3.parts[1].dim, 0);
  EXPECT_EQ(intervals(phi3, 1), (std::vector<Interval>{{12, 24}, {28, 32}, {36, 40}}));
}

TEST(Partition, GroupedQkvOfSharedHeadsIsARanksQueriesAndTheGroupsKeyAndValue) {
  const PartitionedParameter qkv = find(preset_plan(family("falcon"), 4), "query_key_value.weight");
  // A group: 3 queries, a key and a value of 4 rows each.
  EXPECT_EQ(intervals(qkv, 0), (std::vector<Interval>{{0, 8}, {12, 20}}));
  EXPECT_EQ(intervals(qkv, 1), (std::vector<Interval>{{8, 20}}));
  EXPECT_EQ(intervals(qkv, 2), (std::vector<Interval>{{20, 28}, {32, 40}}));
  const PartitionedParameter bloom = find(preset_plan(family("bloom"), 4), "query_key_value.bias");
  EXPECT_EQ(intervals(bloom, 0), (std::vector<Interval>{{0, 24}}));
  EXPECT_EQ(intervals(bloom, 3), (std::vector<Interval>{{60, 72}}));
}

TEST(Partition, UnevenVocabulariesAreSharedEvenly) {
  const PartitionedParameter head = find(preset_plan(family("llama"), 4), "lm_head.weight");
  EXPECT_EQ(head.kind, PartitionKind::kVocabulary);
  const std::vector<Interval> expected = {{0, 13}, {13, 26}, {26, 38}, {38, 50}};
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(intervals(head, rank), std::vector<Interval>{expected[rank]});
}

TEST(Partition, ATiedEmbeddingIsCutOverTheVocabularyAndHasTwoUses) {
  for (const char* name : {"qwen2", "gemma", "bloom", "gpt2", "opt", "falcon", "bert", "t5"}) {
    const PartitionPlan plan = preset_plan(family(name), 2);
    const PartitionedParameter& embedding = plan.parameters.front();
    EXPECT_EQ(embedding.kind, PartitionKind::kVocabulary) << name;
    EXPECT_EQ(embedding.uses.front().output, TensorExchange::kAllReduce) << name;
    EXPECT_EQ(embedding.uses.back().input_gradient, TensorExchange::kAllReduce) << name;
    EXPECT_EQ(embedding.uses.back().output, TensorExchange::kNone) << name;
  }
}

TEST(Partition, GrainsAreNotCutAndTheLastRankHasTheRest) {
  const PartitionPlan plan =
      make_partition_plan(model_of(family("llama")), {.autotp_size = 2, .preset_model = "llama", .tp_grain_size = 16});
  EXPECT_EQ(intervals(find(plan, "up_proj.weight"), 0), (std::vector<Interval>{{0, 16}}));
  EXPECT_EQ(intervals(find(plan, "up_proj.weight"), 1), (std::vector<Interval>{{16, 40}}));
  EXPECT_EQ(intervals(find(plan, "q_proj.weight"), 0), (std::vector<Interval>{{0, 12}}));
}

TEST(Partition, ABiasGoesWithAColumnAndStaysWholeWithARow) {
  const PartitionPlan plan = preset_plan(family("gpt2"), 2);
  EXPECT_EQ(intervals(find(plan, "c_fc.bias"), 1), (std::vector<Interval>{{48, 96}}));
  const PartitionedParameter bias = find(plan, "mlp.c_proj.bias");
  EXPECT_EQ(bias.kind, PartitionKind::kReplicated);
  EXPECT_FALSE(bias.sums_gradient);
  EXPECT_TEXT(bias.why, "added once");
  EXPECT_EQ(intervals(find(preset_plan(family("bert"), 2), "cls.predictions.bias"), 1),
            (std::vector<Interval>{{25, 50}}));
}

TEST(Partition, EveryMatrixOfABlockIsCutSaveRoutersAndSharedLatents) {
  for (const Family& family : families()) {
    for (const PartitionedParameter& parameter : preset_plan(family, 2).parameters) {
      const std::string& name = parameter.name;
      const bool is_block = name.find(".0.") != std::string::npos || name.find(".1.") != std::string::npos;
      if (!is_block || parameter.parts.front().shape.size() < 2) continue;
      const bool is_whole = name.find("gate.weight") != std::string::npos || name.find("_a_proj") != std::string::npos;
      EXPECT_EQ(parameter.kind == PartitionKind::kReplicated, is_whole) << family.preset << ": " << name;
    }
  }
}

TEST(Partition, RoutersAddUpTheirGradients) {
  EXPECT_TRUE(find(preset_plan(family("mixtral"), 2), "mlp.gate.weight").sums_gradient);
  EXPECT_TRUE(find(preset_plan(family("deepseek_v2"), 2), "mlp.gate.weight").sums_gradient);
}

TEST(Partition, ColumnsAddUpInputGradientsAndRowsOutputs) {
  const PartitionPlan plan = preset_plan(family("llama"), 2);
  EXPECT_EQ(find(plan, "up_proj.weight").uses.front(),
            (TensorUse{.name = "model.layers.0.mlp.up_proj.weight", .input_gradient = TensorExchange::kAllReduce}));
  EXPECT_EQ(find(plan, "down_proj.weight").uses.front(),
            (TensorUse{.name = "model.layers.0.mlp.down_proj.weight", .output = TensorExchange::kAllReduce}));
}

TEST(Partition, OneRankHasAllOfEverythingAndExchangesNothing) {
  for (const PartitionedParameter& parameter : preset_plan(family("llama"), 1).parameters) {
    EXPECT_EQ(parameter.parts, (std::vector<TensorPart>{{.shape = parameter.parts.front().shape}}));
    EXPECT_EQ(parameter.kind, PartitionKind::kReplicated);
    EXPECT_EQ(parameter.uses, (std::vector<TensorUse>{{.name = parameter.name}}));
  }
}

TEST(PartitionRefuses, MoreRanksThanHeadsFeaturesOrTokens) {
  EXPECT_TEXT(error_of(model_of(family("llama")), {.autotp_size = 7}), "at most 6 ranks");
  PartitionModel narrow = model_of(family("llama"));
  for (NamedShape& parameter : narrow.parameters)
    for (int64_t& size : parameter.shape) size = size == 40 ? 3 : size;
  EXPECT_TEXT(error_of(narrow, {.autotp_size = 4}), "4 ranks share a dim of 3");
  EXPECT_TEXT(error_of(model_of(family("llama")), {.autotp_size = 4, .tp_grain_size = 20}), "tp_grain_size=20");
  EXPECT_TEXT(error_of(model_of(family("llama")), {.autotp_size = -1}), "autotp_size=-1");
  EXPECT_TEXT(error_of(model_of(family("llama")), {.autotp_size = 2, .tp_grain_size = 0}), "tp_grain_size=0");
}

TEST(PartitionRefuses, HeadsThatAreUnknownOrDoNotFit) {
  for (const char* name : {"bloom", "gpt2", "phi3"}) {
    PartitionModel fused = model_of(family(name));  // a run finds out where heads begin
    fused.heads = fused.key_value_heads = 0;
    EXPECT_EQ(error_of(fused, {.autotp_size = 2}), "no error") << name;
    EXPECT_TEXT(error_of(fused, {.autotp_size = 5}), "num_attention_heads");
  }
  PartitionModel model = model_of(family("llama"));
  model.heads = 5, model.key_value_heads = 0;
  EXPECT_TEXT(error_of(model, {.autotp_size = 2}), "does not divide by 5");
  model.heads = 6, model.key_value_heads = 4;
  EXPECT_TEXT(error_of(model, {.autotp_size = 2}), "6 attention heads do not divide by 4");
}

TEST(Partition, OfHeadsThatAreUnknownIsInEqualShares) {
  for (const char* name : {"llama", "bert", "t5"}) {
    const PartitionModel known = model_of(family(name));
    PartitionModel model = known;
    model.heads = model.key_value_heads = 0;
    const PartitionPlan plan = make_partition_plan(model, {.autotp_size = 2, .preset_model = name});
    const PartitionPlan expected = make_partition_plan(known, {.autotp_size = 2, .preset_model = name});
    for (size_t i = 0; i < plan.parameters.size(); ++i) {
      const PartitionedParameter& parameter = plan.parameters[i];
      EXPECT_EQ(parameter.parts, expected.parameters[i].parts) << parameter.name;  // two ranks divide these heads
      EXPECT_EQ(parameter.kind, expected.parameters[i].kind) << parameter.name;
      EXPECT_EQ(parameter.uses, expected.parameters[i].uses) << parameter.name;
      if (parameter.name.ends_with("q_proj.weight")) {
        EXPECT_TEXT(parameter.why, "whose number is unknown");
      }
    }
    EXPECT_TEXT(error_of(model, {.autotp_size = 5, .preset_model = name}), "give num_attention_heads");
  }
}

// A norm over all queries of a rank is another one than over all of them.
TEST(PartitionRefuses, ANormOverAllHeadsWhateverTheirNumber) {
  PartitionModel model = model_of(family("llama"));
  const auto queries = std::find_if(model.parameters.begin(), model.parameters.end(),
                                    [](const NamedShape& one) { return one.name.ends_with("q_proj.weight"); });
  ASSERT_NE(queries, model.parameters.end());
  std::string name = queries->name;
  name.replace(name.find("q_proj"), 6, "q_norm");
  model.parameters.push_back({name, {queries->shape.front()}});
  for (const int64_t heads : {int64_t{0}, model.heads}) {
    model.heads = heads;
    EXPECT_TEXT(error_of(model, {.autotp_size = 2}), "a norm over all heads");
  }
}

TEST(Presets, AreFoundWhateverTheirCaseAndByModelType) {
  const PartitionModel model = model_of(family("llama"));
  EXPECT_EQ(make_partition_plan(model, {.autotp_size = 2, .preset_model = "LLaMA"}).source, "preset llama");
  EXPECT_EQ(make_partition_plan(model, {.autotp_size = 2}).source, "preset llama, by model_type");
}

TEST(Presets, AnUnknownNameIsRefusedWithWhatThereIs) {
  const std::string error = error_of(model_of(family("llama")), {.autotp_size = 2, .preset_model = "lama"});
  EXPECT_TEXT(error, "preset_model=\"lama\"");
  EXPECT_TEXT(error, "deepseek_v2");
  EXPECT_TEXT(error, "Did you mean `llama`?");
}

TEST(Presets, OfAnotherFamilyAreRefusedWithTheModelsNames) {
  const std::string error = error_of(model_of(family("llama")), {.autotp_size = 2, .preset_model = "bloom"});
  EXPECT_TEXT(error, "no rule of preset bloom");
  EXPECT_TEXT(error, "model.layers.*.self_attn.q_proj.weight");
  EXPECT_TEXT(error, "query_key_value");
}

TEST(Heuristics, SayWhichNamesTheyKnowWhereTheyKnowNone) {
  const std::string error = error_of({.parameters = {{.name = "first.weight", .shape = {8, 8}}}}, {.autotp_size = 2});
  EXPECT_TEXT(error, "find no numbered blocks of layers");
  for (const char* name : {"q_proj", "query_key_value", "qkv_proj", "o_proj", "down_proj", "fc2", "dense"})
    EXPECT_TEXT(error, name);
}

TEST(PartitionModelFacts, HeadCountsAreReadUnderEachFamilysNames) {
  const auto facts = [](const char* text) { return partition_model_from(parse_json(text, "test")); };
  EXPECT_EQ(facts(R"({"model_type": "llama", "num_attention_heads": 8, "num_key_value_heads": 2})").key_value_heads, 2);
  EXPECT_EQ(facts(R"({"model_type": "gpt2", "n_head": 12})").key_value_heads, 12);
  EXPECT_EQ(facts(R"({"model_type": "t5", "num_heads": 6})").heads, 6);
  EXPECT_EQ(facts(R"({"model_type": "falcon", "num_attention_heads": 6, "num_kv_heads": 6})").key_value_heads, 1);
  EXPECT_EQ(facts(R"({"model_type": "falcon", "num_attention_heads": 6, "multi_query": false})").key_value_heads, 6);
  EXPECT_EQ(facts(R"({"model_type": "falcon", "num_attention_heads": 6, "num_kv_heads": 2,
                      "new_decoder_architecture": true})")
                .key_value_heads,
            2);
  EXPECT_EQ(facts(R"({"model_type": "chatglm", "num_attention_heads": 6, "multi_query_attention": true,
                      "multi_query_group_num": 2})")
                .key_value_heads,
            2);
  EXPECT_THROW(facts(R"({"num_attention_heads": 0})"), ConfigError);
}

}  // namespace
}  // namespace trireme
