#include "pager/weights/trace.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

void touch_all(Trace& trace, const std::vector<int>& units) {
  for (const int unit : units) trace.touch(unit);
}

TEST(Trace, KnowsNothingInTheFirstStep) {
  Trace trace(3);
  touch_all(trace, {0, 1});
  EXPECT_FALSE(trace.following());
  EXPECT_EQ(trace.upcoming(1), -1);
  EXPECT_EQ(trace.distance_to(1), Trace::kNever);
}

TEST(Trace, TellsWhatComesNextAndHowFarItIs) {
  Trace trace(4);
  touch_all(trace, {0, 1, 2, 1, 0});
  trace.end_step();
  EXPECT_EQ(trace.upcoming(1), 0);
  trace.touch(0);
  EXPECT_TRUE(trace.following());
  EXPECT_EQ(trace.upcoming(1), 1);
  EXPECT_EQ(trace.upcoming(4), 0);
  EXPECT_EQ(trace.upcoming(5), -1);
  EXPECT_EQ(trace.distance_to(0), 4);
  EXPECT_EQ(trace.distance_to(2), 2);
  EXPECT_EQ(trace.distance_to(3), Trace::kNever);
  touch_all(trace, {1, 2});
  EXPECT_EQ(trace.distance_to(1), 1);
  EXPECT_EQ(trace.distance_to(2), Trace::kNever);
}

TEST(Trace, CountsRepeatedTouchesOnce) {
  Trace trace(2);
  touch_all(trace, {0, 0, 0, 1, 1});
  trace.end_step();
  touch_all(trace, {0, 0, 0, 0});
  EXPECT_TRUE(trace.following());
  EXPECT_EQ(trace.upcoming(1), 1);
}

TEST(Trace, StopsFollowingAStepThatDiffersAndLearnsItInstead) {
  Trace trace(3);
  touch_all(trace, {0, 1, 2});
  trace.end_step();
  touch_all(trace, {0, 2});
  EXPECT_FALSE(trace.following());
  EXPECT_EQ(trace.distance_to(1), Trace::kNever);
  touch_all(trace, {1});
  trace.end_step();
  touch_all(trace, {0});
  EXPECT_TRUE(trace.following());
  EXPECT_EQ(trace.upcoming(1), 2);
  EXPECT_EQ(trace.upcoming(2), 1);
}

TEST(Trace, StopsFollowingAStepThatIsLonger) {
  Trace trace(2);
  touch_all(trace, {0, 1});
  trace.end_step();
  touch_all(trace, {0, 1, 0});
  EXPECT_FALSE(trace.following());
}

TEST(Trace, IsKeptOverAStepThatTouchedNothing) {
  Trace trace(2);
  touch_all(trace, {0, 1});
  trace.end_step();
  trace.end_step();  // zero_grad() before a forward
  EXPECT_TRUE(trace.following());
  EXPECT_EQ(trace.upcoming(1), 0);
  EXPECT_EQ(trace.upcoming(2), 1);
}

TEST(Trace, OfAStepThatNeverEndsDoesNotGrowForEver) {
  Trace trace(2);
  for (size_t i = 0; i < Trace::kLongest + 3; ++i) trace.touch(static_cast<int>(i % 2));
  trace.end_step();
  trace.touch(static_cast<int>(Trace::kLongest % 2));
  EXPECT_EQ(trace.distance_to(static_cast<int>(Trace::kLongest % 2)), 2);
  EXPECT_EQ(trace.upcoming(3), -1);
}

}  // namespace
}  // namespace trireme
