#include "trireme/base/tensor_part.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <numeric>
#include <random>

#include "trireme/base/error.h"

namespace trireme {
namespace {

/// Place of each element of `part`'s flattening in that of the global tensor, by index arithmetic.
std::vector<int64_t> places(const TensorPart& part) {
  const std::vector<int64_t> shape = local_shape(part);
  std::vector<int64_t> along;  // of the cut dim, the global indices
  for (const Interval& interval : part.intervals)
    for (int64_t i = interval.begin; i < interval.end; ++i) along.push_back(i);
  std::vector<int64_t> result;
  for (int64_t local = 0; local < local_numel(part); ++local) {
    int64_t rest = local, place = 0, stride = 1;
    for (int dim = static_cast<int>(shape.size()) - 1; dim >= 0; --dim) {
      const int64_t index = rest % shape[dim];
      rest /= shape[dim];
      place += (dim == part.dim ? along[index] : index) * stride;
      stride *= part.shape[dim];
    }
    result.push_back(place);
  }
  return result;
}

using Pairs = std::map<int64_t, int64_t>;  // place in a's flattening -> place in b's

Pairs expected_pairs(const TensorPart& a, const Interval& a_range, const TensorPart& b, const Interval& b_range) {
  const std::vector<int64_t> of_a = places(a), of_b = places(b);
  std::map<int64_t, int64_t> place_in_b;
  for (int64_t i = b_range.begin; i < b_range.end; ++i) place_in_b[of_b[i]] = i;
  Pairs pairs;
  for (int64_t i = a_range.begin; i < a_range.end; ++i)
    if (const auto found = place_in_b.find(of_a[i]); found != place_in_b.end()) pairs[i] = found->second;
  return pairs;
}

Pairs pairs_of(const std::vector<PartRun>& runs) {
  Pairs pairs;
  for (const PartRun& run : runs)
    for (int64_t row = 0; row < run.count; ++row)
      for (int64_t i = 0; i < run.length; ++i)
        EXPECT_TRUE(pairs.emplace(run.a + row * run.a_stride + i, run.b + row * run.b_stride + i).second);
  return pairs;
}

TEST(TensorPart, HasTheShapeOfItsIntervals) {
  EXPECT_EQ(local_shape({{4, 6}}), (std::vector<int64_t>{4, 6}));
  EXPECT_EQ(local_shape({{4, 6}, 1, {{0, 1}, {3, 5}}}), (std::vector<int64_t>{4, 3}));
  EXPECT_EQ(local_numel({{4, 6, 5}, 1, {{0, 1}, {3, 5}}}), 60);
  EXPECT_EQ(local_numel({{4, 6}, 0, {}}), 0);
  EXPECT_EQ(local_numel({{}}), 1);
}

TEST(TensorPart, IsWrittenInOneWayOnly) {
  EXPECT_EQ(canonical({{4, 6}, 1, {{0, 2}, {2, 3}, {5, 6}}}), (TensorPart{{4, 6}, 1, {{0, 3}, {5, 6}}}));
  EXPECT_EQ(canonical({{4, 6}, 1, {{0, 2}, {2, 6}}}), (TensorPart{{4, 6}}));
  EXPECT_EQ(canonical({{0, 6}, 0, {}}), (TensorPart{{0, 6}}));
  EXPECT_EQ(part_text({{4, 6}, 1, {{0, 3}, {5, 6}}}), "dim 1: 0-3, 5-6");
}

TEST(TensorPart, ThatDoesNotFitItsShapeIsExplained) {
  EXPECT_EQ(part_problem({{4, 6}, 1, {{0, 2}, {3, 6}}}), "");
  EXPECT_EQ(part_problem({{4, 6}, 2, {}}), "dim 2 of a tensor of shape [4, 6]");
  EXPECT_EQ(part_problem({{4, 6}, -1, {{0, 1}}}), "intervals without a dim");
  for (const std::vector<Interval>& intervals :
       {std::vector<Interval>{{0, 7}}, {{-1, 2}}, {{2, 2}}, {{3, 4}, {0, 1}}, {{0, 3}, {2, 4}}})
    EXPECT_NE(part_problem({{4, 6}, 1, intervals}).find("expected intervals that ascend"), std::string::npos);
}

// A column-parallel weight: whole rows are one stretch.
TEST(Intersect, OfRowsIsOneStretch) {
  EXPECT_EQ(intersect({{8, 5}, 0, {{2, 6}}}, {{8, 5}, 0, {{4, 8}}}), (std::vector<PartRun>{{10, 0, 10}}));
  EXPECT_EQ(intersect({{8, 5}}, {{8, 5}, 0, {{4, 8}}}), (std::vector<PartRun>{{20, 0, 20}}));
  EXPECT_EQ(intersect({{8, 5}}, {{8, 5}}), (std::vector<PartRun>{{0, 0, 40}}));
  EXPECT_EQ(intersect({{}}, {{}}), (std::vector<PartRun>{{0, 0, 1}}));
}

// A row-parallel weight of a million rows is one run all the same.
TEST(Intersect, OfColumnsIsOneRunHoweverManyRowsThereAre) {
  EXPECT_EQ(intersect({{1000000, 8}}, {{1000000, 8}, 1, {{2, 4}}}), (std::vector<PartRun>{{2, 0, 2, 1000000, 8, 2}}));
  EXPECT_EQ(intersect({{1000000, 8}, 1, {{0, 4}}}, {{1000000, 8}, 1, {{2, 8}}}),
            (std::vector<PartRun>{{2, 0, 2, 1000000, 4, 6}}));
}

TEST(Intersect, OfRowsWithColumnsIsOneRunOfPieces) {
  EXPECT_EQ(intersect({{1000, 8}, 0, {{10, 20}}}, {{1000, 8}, 1, {{6, 8}}}),
            (std::vector<PartRun>{{6, 20, 2, 10, 8, 2}}));
  EXPECT_EQ(intersect({{1000, 8}, 1, {{6, 8}}}, {{1000, 8}, 0, {{10, 20}}}),
            (std::vector<PartRun>{{20, 6, 2, 10, 2, 8}}));
}

TEST(Intersect, OfFusedHeadsIsOneRunForEachPairThatMeets) {
  // q, k and v of a rank of two, read by a rank of four.
  const TensorPart of_two{{12, 3}, 0, {{0, 2}, {4, 6}, {8, 10}}}, of_four{{12, 3}, 0, {{1, 2}, {5, 6}, {9, 10}}};
  EXPECT_EQ(intersect(of_two, of_four), (std::vector<PartRun>{{3, 0, 3}, {9, 3, 3}, {15, 6, 3}}));
}

TEST(Clip, KeepsWhatIsInBothRanges) {
  const PartRun run{2, 0, 2, 10, 8, 2};  // 2 of every 8 columns
  EXPECT_EQ(clip(run, {0, 80}, {0, 20}), (std::vector<PartRun>{run}));
  EXPECT_EQ(clip(run, {3, 80}, {0, 20}), (std::vector<PartRun>{{3, 1, 1}, {10, 2, 2, 9, 8, 2}}));
  EXPECT_EQ(clip(run, {0, 80}, {0, 5}), (std::vector<PartRun>{{2, 0, 2, 2, 8, 2}, {18, 4, 1}}));
  EXPECT_EQ(clip(run, {4, 10}, {0, 20}), (std::vector<PartRun>{}));
}

TEST(Intersect, MatchesIndexArithmeticForRandomParts) {
  std::mt19937 random(7);
  const auto below = [&](int64_t bound) { return static_cast<int64_t>(random() % static_cast<uint64_t>(bound)); };
  const auto part_of = [&](const std::vector<int64_t>& shape) {
    TensorPart part{shape};
    if (shape.empty() || below(4) == 0) return part;
    part.dim = static_cast<int>(below(static_cast<int64_t>(shape.size())));
    for (int64_t at = below(3); at < shape[part.dim];) {
      const int64_t end = std::min(shape[part.dim], at + 1 + below(3));
      part.intervals.push_back({at, end});
      at = end + below(3);
    }
    return part;
  };
  const auto range_of = [&](const TensorPart& part) {
    const int64_t numel = local_numel(part);
    const int64_t begin = below(numel + 1);
    return below(2) == 0 ? Interval{0, numel} : Interval{begin, begin + below(numel - begin + 1)};
  };
  for (int i = 0; i < 2000; ++i) {
    std::vector<int64_t> shape(below(5));
    for (int64_t& extent : shape) extent = 1 + below(5);
    const TensorPart a = part_of(shape), b = part_of(shape);
    const Interval a_range = range_of(a), b_range = range_of(b);
    std::vector<PartRun> runs;
    for (const PartRun& run : intersect(a, b))
      for (const PartRun& clipped : clip(run, a_range, b_range)) runs.push_back(clipped);
    ASSERT_EQ(pairs_of(runs), expected_pairs(a, a_range, b, b_range))
        << shape_text(shape) << " " << part_text(a) << " and " << part_text(b);
  }
}

TEST(TensorPart, OfSeveralRanksCountsEachElementAtItsFirst) {
  const std::vector<int64_t> shape = {2, 12, 3};
  const std::vector<TensorPart> parts = {{shape, 1, {{0, 4}, {8, 9}}},
                                         {shape, 1, {{2, 6}, {8, 10}}},
                                         {shape, 1, {{2, 6}, {8, 10}}},
                                         {shape, 1, {{4, 12}}}};
  EXPECT_EQ(first_held(parts, 0), parts[0]);
  EXPECT_EQ(first_held(parts, 1), (TensorPart{shape, 1, {{4, 6}, {9, 10}}}));
  EXPECT_EQ(first_held(parts, 2), (TensorPart{shape, 1, {}}));
  EXPECT_EQ(first_held(parts, 3), (TensorPart{shape, 1, {{6, 8}, {10, 12}}}));
  // Rows of six indices, of three elements each: [4, 6) and [9, 10) are the third, fourth and sixth of them.
  EXPECT_EQ(places_in(parts[1], first_held(parts, 1)), (std::vector<Interval>{{6, 12}, {15, 18}, {24, 30}, {33, 36}}));
  EXPECT_EQ(places_in(parts[2], first_held(parts, 2)), (std::vector<Interval>{}));
  EXPECT_EQ(places_in(parts[0], parts[0]), (std::vector<Interval>{{0, 30}}));
}

TEST(TensorPart, OfRanksThatHaveAllIsTheFirstOnes) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {4}, {0, 3}}) {
    const std::vector<TensorPart> parts(2, {shape});
    EXPECT_EQ(first_held(parts, 0), parts[0]);
    EXPECT_EQ(local_numel(first_held(parts, 1)), 0);
  }
}

TEST(Without, MatchesIndexArithmeticForRandomIntervals) {
  std::mt19937 random(3);
  const auto intervals = [&](std::vector<bool>& holds) {
    std::vector<Interval> made;
    for (int64_t at = random() % 3; at < 20;) {
      const int64_t end = std::min<int64_t>(20, at + 1 + random() % 4);
      for (int64_t i = at; i < end; ++i) holds[i] = true;
      made.push_back({at, end});
      at = end + random() % 3;
    }
    return made;
  };
  for (int i = 0; i < 500; ++i) {
    std::vector<bool> from(20), taken(20), left(20);
    const std::vector<Interval> a = intervals(from), b = intervals(taken);
    for (const Interval& one : without(a, b))
      for (int64_t index = one.begin; index < one.end; ++index) left[index] = true;
    for (int64_t index = 0; index < 20; ++index) EXPECT_EQ(left[index], from[index] && !taken[index]);
  }
}

TEST(CheckedNumel, RefusesShapesThatWrapAround) {
  EXPECT_EQ(checked_numel({}, "t"), 1);
  EXPECT_EQ(checked_numel({3, 0, 5}, "t"), 0);
  EXPECT_THROW(checked_numel({-1}, "t"), CheckpointError);
  EXPECT_THROW(checked_numel({int64_t{1} << 40, int64_t{1} << 40}, "t"), CheckpointError);
}

}  // namespace
}  // namespace trireme
