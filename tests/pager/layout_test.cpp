#include "trireme/pager/layout/layout.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme {
namespace {

std::vector<ParameterSpec> specs(const std::vector<std::pair<std::string, int64_t>>& named) {
  std::vector<ParameterSpec> result;
  for (const auto& [name, numel] : named) result.push_back({.name = name, .shape = {numel}});
  return result;
}

std::vector<std::string> unit_names(const Layout& layout) {
  std::vector<std::string> names;
  for (const UnitLayout& unit : layout.units) names.push_back(unit.name);
  return names;
}

using Names = std::vector<std::string>;
const UnitRules kUnmerged{.merge_below_bytes = 0};

TEST(Layout, MakesAUnitOfEachRepeatedBlockAndOfEachOtherModule) {
  const Layout layout = make_layout(specs({{"embed.weight", 10},
                                           {"model.layers.0.attention.weight", 10},
                                           {"model.layers.0.mlp.weight", 10},
                                           {"model.layers.1.attention.weight", 10},
                                           {"model.layers.10.attention.weight", 10},
                                           {"head.weight", 10},
                                           {"head.bias", 10},
                                           {"temperature", 1}}),
                                    2, kUnmerged);
  EXPECT_EQ(unit_names(layout),
            (Names{"embed", "model.layers.0", "model.layers.1", "model.layers.10", "head", "temperature"}));
  EXPECT_EQ(layout.unit_of, (std::vector<int>{0, 1, 1, 2, 3, 4, 4, 5}));
  EXPECT_EQ(layout.placement_of, (std::vector<int>{0, 0, 1, 0, 0, 0, 1, 0}));
}

TEST(Layout, GroupsByTheFirstPatternThatMatches) {
  const UnitRules rules{.patterns = {"^encoder\\.", "[0-9]+\\."}, .merge_below_bytes = 0};
  const Layout layout =
      make_layout(specs({{"encoder.0.w", 4}, {"encoder.1.w", 4}, {"decoder.0.w", 4}, {"decoder.1.w", 4}}), 1, rules);
  EXPECT_EQ(unit_names(layout), (Names{"encoder", "decoder.0", "decoder.1"}));
}

TEST(Layout, MakesOneUnitOfALeafWhateverThePatternsSay) {
  UnitRules rules{.leaves = {"moe.experts", "moe"}, .merge_below_bytes = 0};
  std::vector<ParameterSpec> parameters =
      specs({{"in.w", 4}, {"moe.gate.w", 4}, {"moe.experts.0.w", 4}, {"moe.experts.1.w", 4}, {"moes.0.w", 4}});
  EXPECT_EQ(unit_names(make_layout(parameters, 1, rules)), (Names{"in", "moe", "moes.0"}));
  parameters[2].trainable = false;  // a unit of its own, but gathered with the other
  const Layout layout = make_layout(parameters, 1, rules);
  EXPECT_EQ(unit_names(layout), (Names{"in", "moe", "moe", "moes.0"}));
  EXPECT_EQ(layout.leaf_mates, (std::vector<std::vector<int>>{{}, {1, 2}, {1, 2}, {}}));
}

TEST(Layout, RefusesAPatternThatIsNoRegularExpressionByName) {
  try {
    make_layout(specs({{"a", 1}}), 1, {.patterns = {"layers.(["}});
    FAIL() << "not refused";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("trireme.unit_patterns: 'layers.(['"), std::string::npos) << error.what();
  }
}

TEST(Layout, MergesNeighboursThatAreBothSmall) {
  // 4-byte elements: 100 and 200 are below 1024 bytes, 300 is not.
  const auto parameters = specs({{"a.w", 100}, {"b.w", 100}, {"c.w", 300}, {"d.w", 100}, {"e.w", 200}, {"f.w", 200}});
  const Layout layout = make_layout(parameters, 1, {.merge_below_bytes = 1024});
  EXPECT_EQ(unit_names(layout), (Names{"a", "c", "d", "f"}));
  EXPECT_EQ(layout.unit_of, (std::vector<int>{0, 0, 1, 2, 2, 3}));
}

TEST(Layout, KeepsDtypesAndTrainabilityApart) {
  auto parameters = specs({{"block.0.a", 10}, {"block.0.b", 10}, {"block.0.c", 10}, {"block.0.d", 10}});
  parameters[1].dtype = at::kBFloat16;
  parameters[2].trainable = false;
  const Layout layout = make_layout(parameters, 1, {.merge_below_bytes = 1 << 20});
  EXPECT_EQ(layout.unit_of, (std::vector<int>{0, 1, 2, 0}));
  EXPECT_EQ(layout.units[1].dtype, at::kBFloat16);
  EXPECT_FALSE(layout.units[2].trainable);
}

TEST(Layout, AlignsParametersAndShardsInAnyWorld) {
  for (const int world : {1, 2, 3, 4, 7, 64}) {
    const Layout layout =
        make_layout(specs({{"m.a", 33}, {"m.b", 1}, {"m.c", 0}, {"m.d", 100}, {"m.e", 64}}), world, kUnmerged);
    const UnitLayout& unit = layout.units.at(0);
    const std::vector<int64_t> begins = {0, 64, 96, 96, 224};
    for (size_t i = 0; i < begins.size(); ++i) EXPECT_EQ(unit.parameters[i].begin, begins[i]);
    EXPECT_EQ(unit.used_numel, 198);
    EXPECT_EQ(unit.shard_numel % kAlignment, 0);
    EXPECT_GE(unit.numel(), 288);
    // No more padding than the alignment of one shard per rank.
    EXPECT_LT(unit.numel(), 288 + kAlignment * world);
    EXPECT_EQ(unit.padding(), unit.numel() - 198);
  }
}

TEST(Layout, PortionsOfAllShardsCoverEveryElementOnce) {
  for (const int world : {1, 2, 3, 5}) {
    const Layout layout = make_layout(specs({{"m.a", 33}, {"m.b", 1}, {"m.c", 0}, {"m.d", 500}}), world, kUnmerged);
    const UnitLayout& unit = layout.units.at(0);
    std::vector<std::vector<int>> seen = {std::vector<int>(33), std::vector<int>(1), {}, std::vector<int>(500)};
    for (int rank = 0; rank < world; ++rank) {
      for (const ParameterRange& range : ranges_of(unit, unit.shard_numel * rank, unit.shard_numel)) {
        const ParameterPlace& placement = layout.placement(range.parameter);
        EXPECT_EQ(unit.shard_numel * rank + range.slice_begin, placement.begin + range.parameter_begin);
        for (int64_t i = 0; i < range.numel; ++i) ++seen[range.parameter][range.parameter_begin + i];
      }
    }
    for (const auto& counts : seen)
      for (const int count : counts) EXPECT_EQ(count, 1);
  }
}

TEST(Layout, OfNothingIsEmpty) {
  EXPECT_TRUE(make_layout({}, 4).units.empty());
  EXPECT_EQ(make_layout(specs({{"a", 0}}), 4).units.at(0).numel(), 0);
}

}  // namespace
}  // namespace trireme
