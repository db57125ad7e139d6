// Ranges, cuts along factors, and decisions in closed form.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "trireme/activations/decide.h"
#include "trireme/activations/placement.h"
#include "trireme/base/error.h"

namespace trireme::testing {
namespace {

using Of = std::vector<std::vector<Interval>>;

Cut cut(int axis, int64_t dim, int64_t outer, Ranges ranges) {
  return {axis, dim, outer, std::make_shared<const Ranges>(std::move(ranges))};
}

TEST(RangesOfRanks, JoinWhatTouchesAndDropWhatIsEmpty) {
  EXPECT_EQ(Ranges(6, Of{{{2, 4}, {0, 2}}, {{4, 4}, {4, 6}}}), Ranges(6, Of{{{0, 4}}, {{4, 6}}}));
}

TEST(RangesOfRanks, AreEvenUpToOne) {
  EXPECT_EQ(Ranges::even(7, 3), Ranges(7, Of{{{0, 2}}, {{2, 4}}, {{4, 7}}}));
  EXPECT_EQ(Ranges::even(7, 3).local(2), 3);
}

TEST(RangesOfRanks, GrowAndShrinkByAFactor) {
  const Ranges some(6, Of{{{0, 2}, {4, 6}}, {{2, 4}}});
  EXPECT_EQ(some.times(3), Ranges(18, Of{{{0, 6}, {12, 18}}, {{6, 12}}}));
  EXPECT_EQ(some.over(2), Ranges(3, Of{{{0, 1}, {2, 3}}, {{1, 2}}}));
  EXPECT_FALSE(some.over(4));
  EXPECT_FALSE(Ranges::even(6, 4).over(2)) << "an interval begins between two indices that become one";
}

TEST(RangesOfRanks, AreAlikeInEachStretchOrNot) {
  EXPECT_EQ(Ranges(6, Of{{{0, 1}, {3, 4}}, {{1, 3}, {4, 6}}}).of_each(2), Ranges(3, Of{{{0, 1}}, {{1, 3}}}));
  EXPECT_FALSE(Ranges(6, Of{{{0, 1}, {4, 5}}, {{1, 4}, {5, 6}}}).of_each(2));
  EXPECT_FALSE(Ranges::even(6, 2).of_each(4));
}

TEST(RangesOfRanks, SayWhereIndicesAreInAPart) {
  const Ranges some(8, Of{{{0, 2}, {5, 8}}, {{2, 5}}});
  EXPECT_EQ(some.place_of(0, {1, 6}), (Interval{1, 3}));
  EXPECT_EQ(some.place_of(1, {0, 3}), (Interval{0, 1}));
}

TEST(ACut, RunsAlongTheHeadsOfAMergedDim) {
  // A dim of (heads 4, features 3), two heads a rank.
  const auto found = along({0, 1}, {4, 3}, cut(0, 2, 1, Ranges::even(12, 2)));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->first, 0);
  EXPECT_EQ(found->second.times, 1);
  EXPECT_EQ(found->second.ranges, Ranges::even(4, 2));
}

TEST(ACut, RunsAlongTheHeadsOfAPackedDim) {
  // (query key value, heads 4, features 2), cut alike in each of the three.
  const auto found = along({0, 1, 2}, {3, 4, 2}, cut(0, 0, 3, Ranges::even(8, 2)));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->first, 1);
  EXPECT_EQ(found->second.ranges, Ranges::even(4, 2));
}

TEST(ACut, RunsThroughStretchesOfOneFactor) {
  const auto found = along({0}, {12}, cut(0, 0, 3, Ranges::even(4, 2)));
  ASSERT_TRUE(found);
  EXPECT_EQ(found->second.times, 3);
  EXPECT_EQ(found->second.ranges, Ranges::even(4, 2));
}

TEST(ACut, RunsAlongNoFactorWhereItBeginsWithinOne) {
  EXPECT_FALSE(along({0, 1}, {4, 3}, cut(0, 0, 1, Ranges(12, Of{{{0, 7}}, {{7, 12}}}))));
  EXPECT_FALSE(along({0, 1}, {4, 3}, cut(0, 0, 1, Ranges::even(10, 2)))) << "of another size";
}

TEST(ACut, ComesBackFromItsFactor) {
  const TensorFactors tensor{{3}, {0, 1, 2}};
  const std::vector<int64_t> sizes{3, 4, 2, 5};
  const Cut given = cut(1, 1, 3, Ranges::even(8, 2));
  const auto found = along(tensor[1], sizes, given);
  ASSERT_TRUE(found);
  EXPECT_EQ(cut_by(1, tensor, sizes, found->first, found->second), given);
  EXPECT_FALSE(cut_by(1, {{3}}, sizes, found->first, found->second));
}

/// linear: [b k] [n k] -> [b n].
Row product() {
  Row row;
  const uint8_t b = row.add(4), k = row.add(6, FactorKind::kSum), n = row.add(8);
  row.arguments = {{{b}, {k}}, {{n}, {k}}};
  row.results = {{{b}, {n}}};
  return row;
}

Placement cut_everywhere(const AxisGrid& grid, const Cut& one) {
  Placement placement(grid.positions());
  for (int position = 0; position < grid.positions(); ++position) placement.at(position).push_back(one);
  return placement;
}

TEST(ADecision, OfColumnsGivesColumnsAndLetsTheInputEnter) {
  const AxisGrid grid({2});
  const Row row = product();
  const Decision made = decide(row, {Placement(2), cut_everywhere(grid, cut(0, 0, 1, Ranges::even(8, 2)))}, grid);
  EXPECT_EQ(made.divided, std::vector<int>{0});
  EXPECT_TRUE(made.joins.empty());
  EXPECT_EQ(made.arguments[0], Placement(2));
  EXPECT_EQ(made.results[0], cut_everywhere(grid, cut(0, 1, 1, Ranges::even(8, 2))));
  EXPECT_EQ(made.local[1].sizes_of(row.results[0]), (std::vector<int64_t>{4, 4}));
}

TEST(ADecision, OfRowsJoinsASum) {
  const AxisGrid grid({2});
  const Row row = product();
  const Decision made = decide(
      row,
      {cut_everywhere(grid, cut(0, 1, 1, Ranges::even(6, 2))), cut_everywhere(grid, cut(0, 1, 1, Ranges::even(6, 2)))},
      grid);
  ASSERT_EQ(made.joins.size(), 1u);
  EXPECT_EQ(made.joins[0].kind, FactorKind::kSum);
  EXPECT_EQ(made.results[0], Placement(2));
}

TEST(ADecision, OfWhatIsMixedMakesItWhole) {
  const AxisGrid grid({2});
  Row row;
  const uint8_t b = row.add(4), mixed = row.add(6, FactorKind::kWhole);
  row.arguments = row.results = {{{b}, {mixed}}};
  const Decision made = decide(row, {cut_everywhere(grid, cut(0, 1, 1, Ranges::even(6, 2)))}, grid);
  EXPECT_TRUE(made.divided.empty());
  EXPECT_EQ(made.arguments[0], Placement(2));
}

TEST(ADecision, MovesThePiecesOfAJoinAlone) {
  // roll by 2 of 6: [2, 6) and then [0, 2).
  const AxisGrid grid({2});
  Row row;
  const uint8_t from = row.add(6), to = row.add(6);
  row.arguments = {{{from}}};
  row.results = {{{to}}};
  row.pieces = {{to, {{0, from, 4, 6}, {0, from, 0, 4}}}};
  const Decision made = decide(row, {cut_everywhere(grid, cut(0, 0, 1, Ranges::even(6, 2)))}, grid);
  EXPECT_EQ(made.divided, std::vector<int>{0});
  EXPECT_EQ(made.results[0], cut_everywhere(grid, cut(0, 0, 1, Ranges(6, Of{{{2, 5}}, {{0, 2}, {5, 6}}}))));
  EXPECT_EQ(made.local[1].pieces[0].pieces, (std::vector<Piece>{{0, from, 1, 3}, {0, from, 0, 1}}));
}

TEST(ADecision, LooksAtEveryPositionOfAnOuterAxis) {
  // [2, 6) of 6 indices over 2 ranks, each of whose three are cut over 3: some inner ranks would have none.
  const AxisGrid grid({2, 3});
  Row row;
  const uint8_t from = row.add(6), to = row.add(4);
  row.arguments = {{{from}}};
  row.results = {{{to}}};
  row.pieces = {{to, {{0, from, 2, 6}}}};
  Placement placement(grid.positions());
  for (int position = 0; position < grid.positions(); ++position)
    placement.at(position) = {cut(0, 0, 1, Ranges::even(6, 2)), cut(1, 0, 1, Ranges::even(3, 3))};
  const Decision made = decide(row, {placement}, grid);
  EXPECT_EQ(made.divided, std::vector<int>{0}) << "alike on all ranks, although ranks 3 to 5 all have some";
}

TEST(ADecision, DividesNothingWherePositionsCutOtherFactors) {
  // [(a b)], a = 3 over ranks that have 1 and 2 of it: halves of what they have are halves of b and of a.
  const AxisGrid grid({2, 2});
  Row row;
  const uint8_t a = row.add(3), b = row.add(2);
  row.arguments = {{{a, b}}};
  row.results = {{{a}, {b}}};
  Placement placement(grid.positions());
  for (int position = 0; position < grid.positions(); ++position)
    placement.at(position) = {cut(0, 0, 1, Ranges(6, Of{{{0, 2}}, {{2, 6}}})),
                              cut(1, 0, 1, Ranges::even(position < 2 ? 2 : 4, 2))};
  EXPECT_EQ(decide(row, {placement}, grid).divided, std::vector<int>{0});
}

// --- axes that gather small tensors alone ---

Decision moved(const Row& row, const std::vector<Placement>& arguments, const AxisGrid& grid) {
  return decide(row, arguments, grid, {}, std::vector<Undivided>(grid.axes(), Undivided::kMove));
}

/// [b s] -> [b s], b of 4 and s, of 6, mixed.
Row mixed() {
  Row row;
  const uint8_t b = row.add(4), s = row.add(6, FactorKind::kWhole);
  row.arguments = row.results = {{{b}, {s}}};
  return row;
}

TEST(ADecisionThatMoves, DividesAnotherFactorAndComesBack) {
  const AxisGrid grid({2});
  const Placement tokens = cut_everywhere(grid, cut(0, 1, 1, Ranges(6, Of{{{0, 1}, {4, 6}}, {{1, 4}}})));
  const Row row = mixed();
  const Decision made = moved(row, {tokens}, grid);
  EXPECT_FALSE(made.refusal);
  EXPECT_EQ(made.arguments[0], cut_everywhere(grid, cut(0, 0, 1, Ranges::even(4, 2))));
  EXPECT_EQ(made.results[0], made.arguments[0]);
  EXPECT_EQ(made.returned[0], tokens);
}

TEST(ADecisionThatMoves, RefusesWhereNothingElseCanBeDivided) {
  const AxisGrid grid({5});
  const Row row = mixed();
  const Decision made = moved(row, {cut_everywhere(grid, cut(0, 1, 1, Ranges::even(6, 5)))}, grid);
  ASSERT_TRUE(made.refusal);
  EXPECT_EQ(made.refusal->kind, FactorKind::kWhole);
}

/// x[2:2 + size] of 6 indices.
Row slice_of_six(int64_t size) {
  Row row;
  const uint8_t from = row.add(6), to = row.add(size), d = row.add(2);
  row.arguments = {{{from}, {d}}};
  row.results = {{{to}, {d}}};
  row.pieces = {{to, {{0, from, 2, 2 + size}}}};
  return row;
}

TEST(ADecisionThatMoves, GivesEachRankAnEqualShareOfAPiece) {
  const AxisGrid grid({3});
  const Row row = slice_of_six(4);
  const Decision made = moved(row, {cut_everywhere(grid, cut(0, 0, 1, Ranges::even(6, 3)))}, grid);
  EXPECT_EQ(made.arguments[0], cut_everywhere(grid, cut(0, 0, 1, Ranges(6, Of{{{2, 3}}, {{3, 4}}, {{4, 6}}}))));
  EXPECT_EQ(made.results[0], cut_everywhere(grid, cut(0, 0, 1, Ranges::even(4, 3))));
  EXPECT_EQ(made.returned[0], made.results[0]);
}

TEST(ADecisionThatMoves, GivesFewElementsToEveryRank) {
  const AxisGrid grid({3});
  const Row row = slice_of_six(2);
  const Placement given = cut_everywhere(grid, cut(0, 0, 1, Ranges::even(6, 3)));
  const Decision made = moved(row, {given}, grid);
  EXPECT_EQ(made.arguments[0], given) << "nothing of the argument moves";
  EXPECT_EQ(made.results[0], cut_everywhere(grid, cut(0, 0, 1, Ranges(2, Of{{}, {{0, 2}}, {}}))));
  EXPECT_EQ(made.returned[0], Placement(3));
}

TEST(ADecisionThatMoves, GivesTheLastOfUnevenPiecesToEveryRankAndEqualSharesOfTheOthers) {
  const AxisGrid grid({3});
  Row row;
  const uint8_t from = row.add(8), first = row.add(3), second = row.add(3), last = row.add(2), d = row.add(9);
  row.arguments = {{{from}, {d}}};
  row.results = {{{first}, {d}}, {{second}, {d}}, {{last}, {d}}};
  row.pieces = {{first, {{0, from, 0, 3}}}, {second, {{0, from, 3, 6}}}, {last, {{0, from, 6, 8}}}};
  const Decision made = moved(row, {cut_everywhere(grid, cut(0, 0, 1, Ranges::even(8, 3)))}, grid);
  const Placement shares = cut_everywhere(grid, cut(0, 0, 1, Ranges::even(3, 3)));
  EXPECT_EQ(made.returned, (std::vector<Placement>{shares, shares, Placement(3)}));
}

/// [q d] [k d] -> [q k]: scores.
Row scores(int64_t q, int64_t k, int64_t d) {
  Row row;
  const uint8_t of_q = row.add(q), of_k = row.add(k), of_d = row.add(d, FactorKind::kSum), heads = row.add(4);
  row.arguments = {{{heads}, {of_q}, {of_d}}, {{heads}, {of_k}, {of_d}}};
  row.results = {{{heads}, {of_q}, {of_k}}};
  return row;
}

TEST(ADecisionThatMoves, GathersAnArgumentThatIsSmallBesideTheResultAndMovesALargeOne) {
  const AxisGrid grid({2});
  const Placement tokens = cut_everywhere(grid, cut(0, 1, 1, Ranges::even(8, 2)));
  const Row small = scores(8, 8, 4), large = scores(8, 8, 5);
  EXPECT_EQ(moved(small, {tokens, tokens}, grid).arguments[1], Placement(2))
      << "128 elements of keys, as many scores on each rank";
  const Decision made = moved(large, {tokens, tokens}, grid);
  const Placement heads = cut_everywhere(grid, cut(0, 0, 1, Ranges::even(4, 2)));
  EXPECT_EQ(made.arguments, (std::vector<Placement>{heads, heads}));
  EXPECT_EQ(made.returned[0], tokens);
}

TEST(ADecisionThatMoves, LeavesOtherAxesTheirWay) {
  const AxisGrid grid({2, 2});
  const Row row = mixed();
  Placement placement(grid.positions());
  for (int position = 0; position < grid.positions(); ++position)
    placement.at(position) = {cut(0, 1, 1, Ranges::even(6, 2))};
  const std::vector<Undivided> ways{Undivided::kGather, Undivided::kMove};
  EXPECT_EQ(decide(row, {placement}, grid, {}, ways).arguments[0], Placement(4));
}

TEST(StepsBetweenPlacements, ChangeTheInnerAxisFirstWhereBothCutADim) {
  const AxisGrid grid({2, 2});
  Placement nested(grid.positions()), apart(grid.positions());
  for (int position = 0; position < grid.positions(); ++position) {
    nested.at(position) = {cut(0, 0, 1, Ranges::even(8, 2)), cut(1, 0, 1, Ranges::even(4, 2))};
    apart.at(position) = {cut(0, 1, 1, Ranges::even(8, 2)), cut(1, 2, 1, Ranges::even(8, 2))};
  }
  const auto text = [&](const Placement& from, const Placement& to) {
    std::string made;
    for (const Step& step : steps_between(from, to, grid)) made += str(step.axis, step.is_to_none ? "- " : " ");
    return made;
  };
  EXPECT_EQ(text(nested, apart), "1 0 ");
  EXPECT_EQ(text(apart, nested), "0 1 ");
  EXPECT_EQ(text(nested, nested), "");
  Placement outer_moves = nested;
  for (int position = 0; position < grid.positions(); ++position)
    outer_moves.at(position) = {cut(0, 1, 1, Ranges::even(8, 2)), cut(1, 0, 1, Ranges::even(8, 2))};
  EXPECT_EQ(text(nested, outer_moves), "1- 0 1 ") << "the inner one counts in what the outer one leaves";
}

/// Axes of two ranks each, nested where they cut one dim of 8: `dims` by axis, -1: none.
Placement nested_along(const AxisGrid& grid, const std::vector<int>& dims) {
  Placement placement(grid.positions());
  std::vector<int64_t> left(3, 8);
  for (int axis = 0; axis < grid.axes(); ++axis) {
    if (dims[axis] < 0) continue;
    for (Placement::Cuts& cuts : placement) cuts.push_back(cut(axis, dims[axis], 1, Ranges::even(left[dims[axis]], 2)));
    left[dims[axis]] /= 2;
  }
  return placement;
}

/// From any placement of three axes to any other one: each step is one that ranks can make, and they end.
TEST(StepsBetweenPlacements, LeadFromAnyPlacementOfThreeAxesToAnyOther) {
  const AxisGrid grid({2, 2, 2});
  std::vector<std::vector<int>> all;
  for (int code = 0; code < 64; ++code) all.push_back({code % 4 - 1, code / 4 % 4 - 1, code / 16 - 1});
  for (const std::vector<int>& from : all)
    for (const std::vector<int>& to : all) {
      const Placement given = nested_along(grid, from), wanted = nested_along(grid, to);
      std::map<int, Cut> now, end;
      for (const Cut& one : given.at(0)) now[one.axis] = one;
      for (const Cut& one : wanted.at(0)) end[one.axis] = one;
      std::map<int, int> gathers;
      for (const Step& step : steps_between(given, wanted, grid)) {
        const bool is_cut = !step.is_to_none && end.contains(step.axis);
        gathers[step.axis] += step.is_to_none ? 1 : 0;
        EXPECT_LE(gathers[step.axis], 1);
        for (const auto& [axis, other] : now) {
          if (axis <= step.axis) continue;
          EXPECT_FALSE(now.contains(step.axis) && other.dim == now[step.axis].dim) << "it cuts what this axis leaves";
          EXPECT_FALSE(is_cut && other.dim == end[step.axis].dim) << "it would cut what this axis leaves";
        }
        now.erase(step.axis);
        if (!is_cut) continue;
        int64_t left = 8;
        for (const auto& [axis, other] : now)
          if (axis < step.axis && other.dim == end[step.axis].dim) left /= 2;
        EXPECT_EQ(end[step.axis].whole(), left) << "by the size that earlier axes leave";
        now[step.axis] = end[step.axis];
      }
      EXPECT_EQ(now, end);
    }
}

/// An axis that cuts another dim stays as it is while the two that have to change places do.
TEST(StepsBetweenPlacements, GatherTheAxisThatIsInTheWayAndNotTheLastOne) {
  const AxisGrid grid({2, 2, 2});
  std::string made;
  for (const Step& step : steps_between(nested_along(grid, {0, 1, 2}), nested_along(grid, {1, 0, 2}), grid))
    made += str(step.axis, step.is_to_none ? "- " : " ");
  EXPECT_EQ(made, "1- 0 1 ");
}

}  // namespace
}  // namespace trireme::testing
