// Which units are gathered and released, as a list of actions; no tensors.
#include "pager/weights/residency.h"

#include <gtest/gtest.h>

#include <random>

namespace trireme {
namespace {

constexpr auto kGather = Residency::Kind::kGather;
constexpr auto kRelease = Residency::Kind::kRelease;
using Actions = std::vector<Residency::Action>;

Actions copy(Residency::Actions actions) { return {actions.begin(), actions.end()}; }

/// Units of ten bytes each.
Residency ten_bytes_each(int units, const Residency::Limits& limits) {
  return {std::vector<Residency::Unit>(units, {.bytes = 10, .may_round = true}), limits};
}

class Touches {
 public:
  explicit Touches(Residency& residency) : residency_(residency) {}
  /// A touch by an operator of its own.
  Actions touch(int unit, bool exact = false, bool autocast = false) {
    const Residency::Touch touch{++serial_, exact, autocast};
    Actions actions = copy(residency_.touch(std::span(&unit, 1), touch));
    for (const Residency::Action& ahead : residency_.look_ahead(unit, touch)) actions.push_back(ahead);
    return actions;
  }

 private:
  Residency& residency_;
  uint64_t serial_ = 0;
};

TEST(Residency, ReleasesTheLeastRecentlyTouchedWhereNoStepIsKnown) {
  Residency residency = ten_bytes_each(4, {.live_bytes = 20});
  Touches program(residency);
  EXPECT_EQ(program.touch(0), (Actions{{kGather, 0}}));
  EXPECT_EQ(program.touch(1), (Actions{{kGather, 1}}));
  EXPECT_EQ(program.touch(0), Actions{});
  EXPECT_EQ(program.touch(2), (Actions{{kRelease, 1}, {kGather, 2}}));
  EXPECT_EQ(residency.live_bytes(), 20);
}

TEST(Residency, ReleasesWhatTheLastStepNeededLatest) {
  Residency residency = ten_bytes_each(3, {.live_bytes = 20});
  Touches program(residency);
  for (const int unit : {0, 1, 2, 1, 0}) program.touch(unit);
  (void)residency.release_all();
  residency.end_step();
  program.touch(0);
  program.touch(1);
  EXPECT_EQ(program.touch(2), (Actions{{kRelease, 0}, {kGather, 2}}));  // 1 comes next, 0 after it
}

TEST(Residency, GathersAheadAsFarAsTheLimitsAllow) {
  Residency residency = ten_bytes_each(5, {.live_bytes = 40, .prefetch_bytes = 20});
  Touches program(residency);
  for (int unit = 0; unit < 5; ++unit) program.touch(unit);
  (void)residency.release_all();
  residency.end_step();
  EXPECT_EQ(program.touch(0), (Actions{{kGather, 0}, {kGather, 1}, {kGather, 2}}));
  EXPECT_EQ(program.touch(1), (Actions{{kGather, 3}}));
  EXPECT_EQ(program.touch(2), (Actions{{kRelease, 0}, {kGather, 4}}));
}

TEST(Residency, AnOperatorsOwnUnitsStayWhateverTheLimit) {
  Residency residency = ten_bytes_each(3, {.live_bytes = 10});
  const std::vector<int> all = {0, 1, 2};
  EXPECT_EQ(copy(residency.touch(all, {.serial = 1})), (Actions{{kGather, 0}, {kGather, 1}, {kGather, 2}}));
  EXPECT_EQ(residency.live_bytes(), 30);
}

TEST(Residency, RoundedWeightsDoNotServeWhoNeedsTheirOwnBits) {
  Residency residency = ten_bytes_each(1, {.live_bytes = 20});
  Touches program(residency);
  EXPECT_EQ(program.touch(0, /*exact=*/false, /*autocast=*/true), (Actions{{kGather, 0, /*rounded=*/true}}));
  EXPECT_EQ(program.touch(0, /*exact=*/false, /*autocast=*/true), Actions{});
  EXPECT_EQ(program.touch(0), (Actions{{kRelease, 0, false, /*was_rounded=*/true}, {kGather, 0}}));
  EXPECT_EQ(program.touch(0, /*exact=*/false, /*autocast=*/true), Actions{});
}

TEST(Residency, WhatIsHeldStays) {
  Residency residency = ten_bytes_each(3, {.live_bytes = 10});
  Touches program(residency);
  EXPECT_EQ(copy(residency.hold(0, 100)), (Actions{{kGather, 0}}));
  EXPECT_EQ(program.touch(1), (Actions{{kGather, 1}}));
  EXPECT_EQ(copy(residency.release_all()), (Actions{{kRelease, 1}}));
  program.touch(2);
  EXPECT_EQ(copy(residency.let_go(0)), (Actions{{kRelease, 0}}));
}

/// After `cancel` of the last `count` actions the object decides as one that was never asked for them.
TEST(Residency, ForgetsActionsThatWereNotExecuted) {
  Residency residency = ten_bytes_each(3, {.live_bytes = 20});
  Touches program(residency);
  program.touch(0);
  program.touch(1);
  const int unit = 2;
  const Residency::Actions actions = residency.touch(std::span(&unit, 1), {.serial = 50});
  ASSERT_EQ(copy(actions), (Actions{{kRelease, 0}, {kGather, 2}}));
  residency.cancel(actions.subspan(1));
  EXPECT_EQ(residency.live_bytes(), 10);
  EXPECT_EQ(copy(residency.touch(std::span(&unit, 1), {.serial = 51})), (Actions{{kGather, 2}}));
}

TEST(Residency, ActionsFollowFromTouchesAloneAndKeepTheLimit) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    const int units = 2 + static_cast<int>(random() % 8);
    const int64_t limit = 10 * (2 + static_cast<int64_t>(random() % units));
    Residency first = ten_bytes_each(units, {.live_bytes = limit, .prefetch_bytes = 30});
    Residency second = ten_bytes_each(units, {.live_bytes = limit, .prefetch_bytes = 30});
    Touches a(first), b(second);
    std::vector<bool> whole(units);
    for (int touch = 0; touch < 60; ++touch) {
      const int unit = static_cast<int>(random() % units);
      const Actions actions = a.touch(unit);
      EXPECT_EQ(actions, b.touch(unit));
      for (const Residency::Action& action : actions) {
        EXPECT_NE(whole[action.unit], action.kind == kGather);
        whole[action.unit] = action.kind == kGather;
      }
      EXPECT_TRUE(whole[unit]);
      EXPECT_EQ(first.live_bytes(), 10 * std::count(whole.begin(), whole.end(), true));
      EXPECT_LE(first.live_bytes(), limit);
      if (random() % 20 == 0) {
        first.end_step();
        second.end_step();
      }
    }
  }
}

}  // namespace
}  // namespace trireme
