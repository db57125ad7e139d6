// The groups along the axes of a job: which ranks they have, and what it costs to make them.
#include "trireme/comm/grid.h"

#include <algorithm>

#include "tests/comm/collective_cases.h"
#include "tests/comm/thrown.h"
#include "trireme/comm/fake.h"

namespace trireme {
namespace {

using Axes = std::vector<std::string>;

std::vector<Axes> combinations_of_cube() {
  return {{"pipe"}, {"data"}, {"tensor"}, {"pipe", "data"}, {"pipe", "tensor"}, {"data", "tensor"}};
}

/// The ranks whose coordinates differ from `rank`'s on `axes` alone.
std::vector<int> ranks_beside(const Topology& topology, int rank, const Axes& axes) {
  std::vector<int> ranks;
  for (int other = 0; other < topology.size(); ++other) {
    bool is_beside = true;
    for (const Axis& axis : topology.axes()) {
      const bool varies = std::find(axes.begin(), axes.end(), axis.name) != axes.end();
      is_beside =
          is_beside && (varies || topology.position_of(other, axis.name) == topology.position_of(rank, axis.name));
    }
    if (is_beside) ranks.push_back(other);
  }
  return ranks;
}

std::vector<int> world_ranks_of(const Grid& grid, const Group& group) {
  std::vector<int> ranks;
  for (int rank = 0; rank < group.size(); ++rank) ranks.push_back(grid.world_rank_of(group, rank));
  return ranks;
}

TEST(AGrid, OfThreeAxesOver1024RanksMakesAtMostOneCollectivePerCombination) {
  const Topology topology({{"pipe", 4}, {"data", 32}, {"tensor", 8}});
  for (const int rank : {0, 1, 517, 1023}) {
    const auto world = make_fake_group(rank, 1024);
    const Grid grid(*world, topology);
    EXPECT_EQ(world->counters().calls, 6);
    for (const Axes& axes : combinations_of_cube()) {
      const Group& group = grid.along(axes);
      const std::vector<int> expected = ranks_beside(topology, rank, axes);
      EXPECT_EQ(world_ranks_of(grid, group), expected);
      EXPECT_EQ(grid.world_rank_of(group, group.rank()), rank);
    }
    EXPECT_EQ(world->counters().calls, 6);
  }
}

TEST(AGrid, OfRealRanksReducesAlongEveryCombination) {
  const Topology topology({{"pipe", 2}, {"data", 2}, {"tensor", 2}});
  for (const RankBackend backend : {RankBackend::kThreads, RankBackend::kC10d})
    run_ranks(8,
              [&](Rank& rank) {
                const Grid grid(rank.world(), topology);
                EXPECT_EQ(rank.world().counters().calls, 6);
                for (const Axes& axes : combinations_of_cube()) {
                  // Each rank has a bit of its own.
                  const at::Tensor sum = at::full({100}, int64_t{1} << rank.id(), at::kLong);
                  grid.along(axes).all_reduce(sum).wait();
                  int64_t expected = 0;
                  for (const int peer : ranks_beside(topology, rank.id(), axes)) expected |= int64_t{1} << peer;
                  EXPECT_EQ(sum[99].item<int64_t>(), expected);
                }
                const at::Tensor all = at::ones({1});
                grid.along({"tensor", "pipe", "data"}).all_reduce(all).wait();
                EXPECT_EQ(all.item<int>(), 8);
              },
              {.backend = backend});
}

TEST(AGrid, OfOneAxisIsItsWorldAndCostsNothing) {
  const auto world = make_fake_group(3, 8);
  const Grid grid(*world, Topology({{"data", 8}, {"tensor", 1}}));
  EXPECT_EQ(&grid.along({"data"}), world.get());
  EXPECT_EQ(&grid.along({"data", "tensor"}), world.get());
  EXPECT_EQ(&grid.world(), world.get());
  EXPECT_EQ(world->counters().calls, 0);
  EXPECT_EQ(grid.where(), "data 3");
}

TEST(AnAxisOfOneRank, IsAGroupThatTalksToNobody) {
  const auto world = make_fake_group(3, 8);
  const Grid grid(*world, Topology({{"data", 8}, {"tensor", 1}}));
  Group& alone = grid.along({"tensor"});
  EXPECT_EQ(alone.size(), 1);
  EXPECT_EQ(grid.world_rank_of(alone, 0), 3);
  const at::Tensor tensor = at::full({4}, 7.0);
  alone.all_reduce(tensor).wait();
  alone.barrier();
  EXPECT_TRUE(at::equal(tensor, at::full({4}, 7.0)));
  EXPECT_EQ(world->counters().calls, 0);
}

TEST(AGrid, OfOneRankHasOneGroup) {
  const auto world = make_fake_group(0, 1);
  const Grid grid(*world, Topology({{"data", 1}}));
  EXPECT_EQ(&grid.along({"data"}), world.get());
  EXPECT_EQ(grid.where(), "");
}

TEST(AGrid, TellsWhereARankIs) {
  const auto world = make_fake_group(11, 24);
  const Grid grid(*world, Topology({{"pipe", 2}, {"data", 4}, {"tensor", 3}, {"sequence", 1}}));
  EXPECT_EQ(grid.where(), "pipe 0, data 3, tensor 2");
  EXPECT_EQ(grid.position_on("data"), 3);
  EXPECT_EQ(grid.along({"data"}).name(), "pipe0-tensor2/data");
  EXPECT_EQ(grid.along({"tensor", "data", "sequence"}).name(), "pipe0/data-tensor");
  EXPECT_EQ(grid.along({"sequence"}).name(), "pipe0-data3-tensor2");
}

TEST(AGrid, RefusesATopologyOfOtherSizeAndUnknownAxes) {
  const auto world = make_fake_group(0, 6);
  EXPECT_EQ(thrown_by([&] {
              Grid(*world, Topology({{"data", 4}}));
            }).text,
            "the topology has 4 ranks and group 'fake' has 6; the sizes of the axes must multiply to the number of "
            "ranks");
  const Grid grid(*world, Topology({{"data", 3}, {"tensor", 2}}));
  const Thrown thrown = thrown_by([&] { (void)grid.along({"data", "tensr"}); });
  EXPECT_EQ(thrown.code, ErrorCode::kConfig);
  EXPECT_TRUE(thrown.has("the topology has no axis \"tensr\". Did you mean `tensor`?")) << thrown.text;
}

}  // namespace
}  // namespace trireme
