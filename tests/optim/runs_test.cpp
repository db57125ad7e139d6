#include "optim/runs.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

/// Parameters of 40, 32 and 5 elements at 0, 64 and 96 of a unit of 128.
UnitLayout three_parameters() {
  UnitLayout unit;
  unit.shard_numel = 128;
  unit.used_numel = 77;
  unit.parameters = {{.index = 4, .begin = 0, .numel = 40},
                     {.index = 1, .begin = 64, .numel = 32},
                     {.index = 2, .begin = 96, .numel = 5}};
  return unit;
}

std::vector<std::vector<int64_t>> as_lists(const std::vector<Run>& runs) {
  std::vector<std::vector<int64_t>> lists;
  for (const Run& run : runs) lists.push_back({run.begin, run.end, run.step});
  return lists;
}

const std::vector<int> kOneGroup(5, 0);

using Lists = std::vector<std::vector<int64_t>>;

TEST(Runs, AllTouchedAtTheSameStepIsOneRunOverThePaddingToo) {
  EXPECT_EQ(as_lists(plan_runs(three_parameters(), 0, 128, {true, true, true, true, true}, {9, 7, 7, 9, 7}, kOneGroup)),
            (Lists{{0, 128, 8}}));
}

TEST(Runs, AnUntouchedParameterSplitsTheRunAtPaddedBoundaries) {
  EXPECT_EQ(
      as_lists(plan_runs(three_parameters(), 0, 128, {true, false, true, true, true}, {0, 0, 0, 0, 0}, kOneGroup)),
      (Lists{{0, 64, 1}, {96, 128, 1}}));
}

TEST(Runs, ParametersWithDifferentStepCountsAreUpdatedApart) {
  EXPECT_EQ(as_lists(plan_runs(three_parameters(), 0, 128, {true, true, true, true, true}, {0, 2, 3, 0, 2}, kOneGroup)),
            (Lists{{0, 96, 3}, {96, 128, 4}}));
}

TEST(Runs, ParametersOfDifferentGroupsAreUpdatedApart) {
  const auto runs =
      plan_runs(three_parameters(), 0, 128, {true, true, true, true, true}, {0, 0, 0, 0, 0}, {7, 2, 2, 7, 1});
  EXPECT_EQ(as_lists(runs), (Lists{{0, 64, 1}, {64, 128, 1}}));
  EXPECT_EQ(runs[0].group, 1);
  EXPECT_EQ(runs[1].group, 2);
}

TEST(Runs, AShardCountsFromItsOwnStart) {
  EXPECT_EQ(as_lists(plan_runs(three_parameters(), 32, 64, {true, true, true, true, true}, {0, 1, 1, 0, 0}, kOneGroup)),
            (Lists{{0, 32, 1}, {32, 64, 2}}));
}

TEST(ParameterRanges, OfAShardThatBeginsAndEndsInsideParameters) {
  const std::vector<ParameterRange> ranges = ranges_of(three_parameters(), 32, 66);
  ASSERT_EQ(ranges.size(), 3);
  EXPECT_EQ(ranges[0].parameter, 4);
  EXPECT_EQ(ranges[0].slice_begin, 0);
  EXPECT_EQ(ranges[0].parameter_begin, 32);
  EXPECT_EQ(ranges[0].numel, 8);
  EXPECT_EQ(ranges[1].parameter, 1);
  EXPECT_EQ(ranges[1].slice_begin, 32);
  EXPECT_EQ(ranges[1].parameter_begin, 0);
  EXPECT_EQ(ranges[1].numel, 32);
  EXPECT_EQ(ranges[2].slice_begin, 64);
  EXPECT_EQ(ranges[2].numel, 2);
}

}  // namespace
}  // namespace trireme
