#include <atomic>

#include "tests/comm/collective_cases.h"

namespace trireme {
namespace {

using Moves = OnEveryWorld;

template <class Body>
void for_each_tensor(const Body& body) {
  for (const at::ScalarType dtype : all_dtypes())
    for (const int64_t numel : lengths(dtype)) body(dtype, numel);
}

at::Tensor shard_of(const at::Tensor& whole, const Rank& rank) {
  const ShardRange own = shard_range(whole.numel(), rank.size(), rank.id());
  return whole.slice(0, own.begin, own.end);
}

TEST_P(Moves, AllGatherPutsEveryShardInItsPlace) {
  run([](Rank& rank) {
    for_each_tensor([&](at::ScalarType dtype, int64_t numel) {
      const at::Tensor expected = numbers(numel, 0, dtype);
      at::Tensor whole = at::zeros({numel}, dtype);
      rank.world().all_gather(whole, shard_of(expected, rank).clone()).wait();
      EXPECT_TRUE(at::equal(whole, expected)) << dtype << " numel " << numel;
    });
  });
}

TEST_P(Moves, AllGatherWorksInPlace) {
  run([](Rank& rank) {
    for (const int64_t numel : lengths()) {
      const at::Tensor expected = numbers(numel, 0, at::kFloat);
      at::Tensor whole = at::zeros({numel});
      const at::Tensor own = shard_of(whole, rank);
      own.copy_(shard_of(expected, rank));
      rank.world().all_gather(whole, own).wait();
      EXPECT_TRUE(at::equal(whole, expected)) << "numel " << numel;
    }
  });
}

TEST_P(Moves, BroadcastGivesEveryRankTheRootsNumbers) {
  run([](Rank& rank) {
    for_each_tensor([&](at::ScalarType dtype, int64_t numel) {
      for (int root = 0; root < rank.size(); ++root) {
        at::Tensor tensor = numbers(numel, rank.id(), dtype);
        rank.world().broadcast(tensor, root).wait();
        EXPECT_TRUE(at::equal(tensor, numbers(numel, root, dtype))) << dtype << " numel " << numel << " root " << root;
      }
    });
  });
}

TEST_P(Moves, AllToAllGivesRankRBlockROfEveryRank) {
  run([](Rank& rank) {
    for_each_tensor([&](at::ScalarType dtype, int64_t numel) {
      const int size = rank.size();
      const at::Tensor input = numbers(numel * size, rank.id(), dtype);
      at::Tensor output = at::zeros({numel * size}, dtype);
      rank.world().all_to_all(output, input).wait();
      for (int peer = 0; peer < size; ++peer) {
        const at::Tensor expected =
            numbers(numel * size, peer, dtype).slice(0, rank.id() * numel, (rank.id() + 1) * numel);
        EXPECT_TRUE(at::equal(output.slice(0, peer * numel, (peer + 1) * numel), expected))
            << dtype << " numel " << numel;
      }
    });
  });
}

TEST_P(Moves, GatherGivesTheRootEveryRanksBlock) {
  run([](Rank& rank) {
    for_each_tensor([&](at::ScalarType dtype, int64_t numel) {
      const int root = rank.size() - 1;
      at::Tensor output = rank.id() == root ? at::zeros({numel * rank.size()}, dtype) : at::Tensor();
      rank.world().gather(output, numbers(numel, rank.id(), dtype), root).wait();
      for (int peer = 0; rank.id() == root && peer < rank.size(); ++peer)
        EXPECT_TRUE(at::equal(output.slice(0, peer * numel, (peer + 1) * numel), numbers(numel, peer, dtype)))
            << dtype << " numel " << numel << " peer " << peer;
    });
  });
}

TEST_P(Moves, ScatterGivesEachRankItsBlockOfTheRoot) {
  run([](Rank& rank) {
    for_each_tensor([&](at::ScalarType dtype, int64_t numel) {
      const int root = rank.size() / 2;
      const at::Tensor all = numbers(numel * rank.size(), 3, dtype);
      at::Tensor output = at::zeros({numel}, dtype);
      rank.world().scatter(output, rank.id() == root ? all : at::Tensor(), root).wait();
      EXPECT_TRUE(at::equal(output, all.slice(0, rank.id() * numel, (rank.id() + 1) * numel)))
          << dtype << " numel " << numel;
    });
  });
}

TEST_P(Moves, BarrierLetsNobodyThroughBeforeTheLastHasCome) {
  std::atomic<int> arrived{0};
  run([&arrived](Rank& rank) {
    for (int round = 1; round <= 200; ++round) {
      arrived.fetch_add(1);
      rank.world().barrier();
      EXPECT_EQ(arrived.load(), round * rank.size());
      rank.world().barrier();
    }
  });
}

TRIREME_ON_EVERY_WORLD(Moves);

}  // namespace
}  // namespace trireme
