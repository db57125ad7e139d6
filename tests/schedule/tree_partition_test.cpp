// The published partition of a tree of modules, on trees done by hand.
#include "trireme/schedule/tree_partition.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme::pipeline {
namespace {

using Homes = std::vector<int>;

TEST(TreePartition, OfOneStageHasAll) {
  EXPECT_EQ(tree_partition({{-1, 1}, {0, 2}, {1, 3}}, 1), (Homes{0, 0, 0}));
  EXPECT_EQ(tree_partition({}, 3), Homes{});
  EXPECT_EQ(tree_partition({{-1, 5}}, 3), Homes{0});
}

TEST(TreePartition, GivesEachOfEqualChildrenADevice) {
  EXPECT_EQ(tree_partition({{-1}, {0, 1}, {0, 1}, {0, 1}}, 3), (Homes{0, 0, 1, 2}));
}

TEST(TreePartition, GivesTheFirstDeviceToTheHeaviestSegment) {
  EXPECT_EQ(tree_partition({{-1}, {0, 1}, {0, 4}}, 2)[2], 0);
}

TEST(TreePartition, DividesByTheSegmentsOwnCount) {
  // Quotients 6 and 4: device 0 goes to the first, then 3 and 4, then 3 and 2: devices 0 and 2, and 1. The first one's
  // children, two of 3, get 0 and 2.
  EXPECT_EQ(tree_partition({{-1}, {0}, {0, 4}, {1, 3}, {1, 3}}, 3), (Homes{0, 0, 1, 0, 2}));
}

TEST(TreePartition, LeavesWhatGetsNoDeviceToTheParents) {
  // Quotients 10 and 1, then 5 and 1: both devices go to the first, which can use one alone.
  EXPECT_EQ(tree_partition({{-1}, {0, 10}, {0, 1}}, 2), (Homes{0, 0, 0}));
}

TEST(TreePartition, CutsChildrenIntoContiguousSegments) {
  // Two segments of 1, 1, 1, 3: three and one.
  EXPECT_EQ(tree_partition({{-1}, {0, 1}, {0, 1}, {0, 1}, {0, 3}}, 2), (Homes{0, 0, 0, 0, 1}));
}

TEST(TreePartition, OfEqualQuotientsTheFirstSegmentGetsTheDevice) {
  // 2 and 1 of three devices: 2 : 1, 1 : 1, where the first one gets device 1, then 2/3 : 1.
  EXPECT_EQ(tree_partition({{-1}, {0}, {0, 1}, {1, 1}, {1, 1}}, 3), (Homes{0, 0, 2, 0, 1}));
}

TEST(TreePartition, CutsASegmentOfSeveralModulesAgain) {
  // Children 2, 2, 8 of three devices: each is a segment; the quotients 8, 4 give devices 0 and 1 to the third, then
  // 2.67 : 2 the last one too, so that the others go to the parent's.
  EXPECT_EQ(tree_partition({{-1}, {0, 2}, {0, 2}, {0}, {3, 4}, {3, 4}}, 3), (Homes{0, 0, 0, 0, 0, 1}));
  // 1, 1, 1, 1, 1, 1 of two parents with two devices each: two segments of two modules, then of one and two.
  EXPECT_EQ(tree_partition({{-1}, {0}, {0}, {1, 1}, {1, 1}, {1, 1}, {2, 1}, {2, 1}, {2, 1}}, 4),
            (Homes{0, 0, 1, 2, 0, 0, 3, 1, 1}));
}

TEST(TreePartition, CountsAModulesOwnCostOnTheFirstOfItsDevices) {
  EXPECT_EQ(tree_partition({{-1, 9}, {0, 1}, {0, 1}}, 2), (Homes{0, 0, 1}));
}

TEST(TreePartition, RefusesWhatIsNoTree) {
  EXPECT_THROW((void)tree_partition({{-1}, {0, -1}}, 2), ConfigError);
  EXPECT_THROW((void)tree_partition({{-1}, {1}}, 2), ConfigError);
  EXPECT_THROW((void)tree_partition({{-1}, {-1}}, 2), ConfigError);
  EXPECT_THROW((void)tree_partition({{0}}, 2), ConfigError);
  EXPECT_THROW((void)tree_partition({{-1}}, 0), ConfigError);
}

}  // namespace
}  // namespace trireme::pipeline
