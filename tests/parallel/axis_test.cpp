// A new axis is a value of its own and a line in the list of axes: plan, groups, divisor, text and refusals follow.
#include "trireme/parallel/axis.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/support/error_of.h"
#include "trireme/parallel/plan.h"

namespace trireme {
namespace {

using testing::error_of;

/// Ranks that compute the same samples twice, and average.
const AxisPart& mirror_axis() {
  static const AxisPart axis = {.name = "mirror",
                                .shares_samples = true,
                                .shares_layers = true,
                                .shards_states = false,
                                .law = SharedGradient::kParts,
                                .together = "mirror each other",
                                .pass = [](const ParallelOptions&) -> std::optional<PlannedPass> {
                                  return PlannedPass{PassOrder::kRecompute, "mirrors"};
                                },
                                .exclusions = {{.other = Feature::kDeterministic, .text = "{}: {} mirrors draw apart"},
                                               {.other = Feature::kTensor, .text = "{} mirrors of {} slices"}}};
  return axis;
}

ParallelOptions with_mirror(const Degrees& degrees) {
  ParallelOptions options{.degrees = degrees};
  options.pager.stage = 1;
  options.axes.push_back(&mirror_axis());
  return options;
}

ParallelPlan plan_of(int rank) {
  return make_plan(Topology({{"mirror", 2}, {"pipe", 2}, {"data", 2}}), rank, with_mirror({.data = 2, .pipe = 2}));
}

TEST(Axis, OfATestHasItsGroups) {
  const ParallelPlan plan = plan_of(5);
  EXPECT_EQ(plan.along("mirror").of(5), (std::vector<int>{1, 5}));
  EXPECT_EQ(plan.stage.of(5), (std::vector<int>{0, 1, 4, 5}));
  EXPECT_EQ(plan.sums.of(5), (std::vector<int>{0, 1, 4, 5}));
  EXPECT_EQ(plan.shards.of(5), (std::vector<int>{4, 5}));
  EXPECT_EQ(plan.model.size(), 8);
}

TEST(Axis, OfATestGivesItsRanksTheSameSamples) {
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(plan_of(rank).place.rank, plan_of(rank + 4).place.rank);
    EXPECT_EQ(plan_of(rank).place.size, 2);
  }
}

// Its ranks have parts of one sample's gradient: all four are averaged, and a sum over samples is one over both halves.
TEST(Axis, OfATestAddsGradientsByItsLaw) {
  EXPECT_EQ(plan_of(0).mean_over, 4);
  ParallelOptions sum = with_mirror({.data = 2});
  sum.pager.gradient_op = ReduceOp::kSum;
  const ParallelPlan plan = make_plan(Topology({{"mirror", 2}, {"data", 2}}), 0, sum);
  EXPECT_EQ(plan.mean_over, 2);
  EXPECT_EQ(plan.reduce_op, ReduceOp::kMean);
}

TEST(Axis, OfATestIsPrinted) {
  const std::string text = plan_text(plan_of(5));
  for (const char* line : {"  mirror    2, position 1; ranks 0,4 1,5 2,6 3,7\n", "  mirror each other     1,5\n",
                           "  mirrors, along mirror\n"})
    EXPECT_NE(text.find(line), std::string::npos) << text;
}

TEST(Axis, OfATestIsRefusedByItsExclusions) {
  ParallelOptions options = with_mirror({.data = 2});
  options.pager.deterministic = true;
  const auto refusal = [](const Topology& ranks, const ParallelOptions& of) {
    return error_of([&] { (void)make_plan(ranks, 0, of); });
  };
  EXPECT_EQ(refusal(Topology({{"mirror", 3}, {"data", 2}}), options), "axis \"mirror\": 3 mirrors draw apart");
  EXPECT_NO_THROW((void)make_plan(Topology({{"data", 2}}), 0, options));
  EXPECT_EQ(refusal(Topology({{"mirror", 2}, {"tensor", 3}}), with_mirror({.tensor = 3})), "2 mirrors of 3 slices");
  EXPECT_EQ(
      refusal(Topology({{"mirror", 2}}), {}),
      "axis \"mirror\" of 2 ranks is not there yet; use \"pipe\", \"data\", \"sequence\", \"tensor\" and \"model\"");
}

TEST(Axes, HaveOneNameEachAndSayWhatRefusesThem) {
  std::set<std::string> names;
  for (const AxisPart* axis : all_axes()) {
    EXPECT_TRUE(names.insert(axis->name).second) << axis->name;
    EXPECT_EQ(axis->degree == nullptr, axis->member == nullptr) << axis->name;
    EXPECT_TRUE(axis->exclusions.empty() || axis->feature) << axis->name;  // rows of exclusions() name it
    // Ranks that have no parameter in common have no shards of one, either.
    EXPECT_TRUE(axis->law || (!axis->shares_layers && !axis->shards_states)) << axis->name;
  }
}

TEST(Placement, LetsTheRightMostLetterVaryFastest) {
  const Degrees degrees{.data = 2, .pipe = 3, .tensor = 4};
  EXPECT_EQ(place("cluster", degrees), Topology({{"data", 2}, {"pipe", 3}, {"tensor", 4}}));
  EXPECT_EQ(place("spread", degrees), Topology({{"tensor", 4}, {"pipe", 3}, {"data", 2}}));
  EXPECT_EQ(place("PDT", degrees), Topology({{"pipe", 3}, {"data", 2}, {"tensor", 4}}));
  EXPECT_EQ(place("cluster", degrees).group_of(0, "tensor"), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(place("spread", degrees).group_of(0, "data"), (std::vector<int>{0, 1}));
}

TEST(Placement, RefusesOtherStrategies) {
  for (const char* strategy : {"", "DP", "DPP", "DPTT", "scatter"})
    EXPECT_EQ(error_of([&] { (void)place(strategy, {}); }),
              std::string("placement_strategy is \"") + strategy +
                  "\"; expected \"cluster\", \"spread\" or the letters D, P and T in any order");
}

}  // namespace
}  // namespace trireme
