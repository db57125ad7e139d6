#include "trireme/topology.h"

#include <gtest/gtest.h>

#include <functional>

#include "tests/support/error_of.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using testing::error_of;

using Groups = std::vector<std::vector<int>>;

Topology cube() { return Topology({{"pipe", 2}, {"data", 2}, {"model", 2}}); }

TEST(Topology, NumbersRanksInRowMajorOrder) {
  const Topology grid({{"x", 2}, {"y", 3}});
  EXPECT_EQ(grid.size(), 6);
  for (int x = 0; x < 2; ++x)
    for (int y = 0; y < 3; ++y) {
      const int rank = grid.rank_of({{"x", x}, {"y", y}});
      EXPECT_EQ(rank, 3 * x + y);
      EXPECT_EQ(grid.rank_of({{"y", y}, {"x", x}}), rank);
      EXPECT_EQ(grid.coordinate_of(rank), (std::vector<int>{x, y}));
      EXPECT_EQ(grid.position_of(rank, "y"), y);
    }
}

TEST(Topology, GroupsRanksThatDifferOnOneAxisAlone) {
  EXPECT_EQ(cube().groups_along("pipe"), (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  EXPECT_EQ(cube().groups_along("data"), (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}}));
  EXPECT_EQ(cube().groups_along("model"), (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
}

TEST(Topology, GroupsRanksThatDifferOnSeveralAxes) {
  EXPECT_EQ(cube().groups_along_all({"pipe", "model"}), (Groups{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(cube().groups_along_all({"model", "pipe"}), cube().groups_along_all({"pipe", "model"}));
  EXPECT_EQ(cube().groups_along_all({"data"}), cube().groups_along("data"));
  EXPECT_EQ(cube().groups_along_all({"pipe", "data", "model"}), (Groups{{0, 1, 2, 3, 4, 5, 6, 7}}));
  EXPECT_EQ(cube().groups_along_all({}).size(), 8u);
  EXPECT_EQ(error_of([] { cube().groups_along_all({"pip"}); }),
            "the topology has no axis \"pip\". Did you mean `pipe`?");
}

TEST(Topology, PutsEveryRankInOneGroupOfEachAxis) {
  const Topology grid({{"a", 3}, {"b", 4}, {"c", 5}});
  for (const Axis& axis : grid.axes()) {
    std::vector<int> seen(grid.size(), 0);
    for (const auto& group : grid.groups_along(axis.name)) {
      EXPECT_EQ(group.size(), static_cast<size_t>(axis.size));
      for (int rank : group) {
        ++seen[rank];
        EXPECT_EQ(grid.group_of(rank, axis.name), group);
      }
    }
    EXPECT_EQ(seen, std::vector<int>(grid.size(), 1));
  }
}

TEST(Topology, SelectsRanksByPosition) {
  EXPECT_EQ(cube().ranks_at({{"pipe", 0}, {"data", 1}}), (std::vector<int>{2, 3}));
  EXPECT_EQ(cube().ranks_at({{"model", 1}}), (std::vector<int>{1, 3, 5, 7}));
  EXPECT_EQ(cube().ranks_at({}).size(), 8u);
  EXPECT_TRUE(cube().ranks_at({{"pipe", 5}}).empty());
}

TEST(Topology, TreatsAnAbsentAxisAsOneRankWide) {
  EXPECT_FALSE(cube().has("tensor"));
  EXPECT_EQ(cube().size_of("tensor"), 1);
  EXPECT_EQ(cube().position_of(5, "tensor"), 0);
  EXPECT_EQ(cube().group_of(5, "tensor"), std::vector<int>{5});
  EXPECT_TRUE(cube().groups_along("tensor").empty());
}

TEST(Topology, LabelsARankByAxisAndPosition) {
  const Topology grid({{"a", 2}, {"b", 2}});
  EXPECT_EQ(grid.label_of(3), "a_01-b_01");
  EXPECT_EQ(grid.label_of(3, {"a"}), "b_01");
  EXPECT_EQ(cube().label_of(1), "model_01");
  EXPECT_EQ(Topology({{"a", 12}}).label_of(11), "a_11");
}

TEST(Topology, RefusesAxesThatMakeNoGrid) {
  EXPECT_EQ(error_of([] { Topology({}); }), "a topology needs at least one axis, such as {\"data\", 4}");
  EXPECT_EQ(error_of([] { Topology({{"a", 0}}); }), "the axis \"a\" has size 0; expected 1 or more");
  EXPECT_EQ(error_of([] {
              Topology({{"a", 1}, {"a", 2}});
            }),
            "the axis \"a\" stands twice in the topology; rename or remove one");
  EXPECT_EQ(error_of([] { Topology({{"", 1}}); }), "axis 0 of the topology has no name; give it one");
  EXPECT_NE(error_of([] {
              Topology({{"a", 1 << 20}, {"b", 1 << 20}});
            }).find("more ranks than fit"),
            std::string::npos);
}

TEST(Topology, RefusesCoordinatesThatAreNotOnTheGrid) {
  EXPECT_EQ(error_of([] {
              cube().rank_of({{"pipe", 0}, {"data", 0}});
            }),
            "the coordinate lacks the axis \"model\"; give its position");
  EXPECT_EQ(error_of([] { cube().rank_of({{"pipe", 2}}); }), "position 2 on axis \"pipe\"; expected 0 to 1");
  EXPECT_EQ(error_of([] {
              cube().rank_of({{"pipe", 0}, {"pipe", 1}});
            }),
            "the axis \"pipe\" is given twice; name each axis once");
  EXPECT_EQ(error_of([] {
              cube().ranks_at({{"modle", 0}});
            }),
            "the topology has no axis \"modle\". Did you mean `model`?");
  EXPECT_EQ(error_of([] { cube().coordinate_of(8); }), "rank 8 is not in the topology; expected 0 to 7");
}

}  // namespace
}  // namespace trireme
