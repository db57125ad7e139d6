#include <atomic>
#include <thread>

#include "tests/comm/collective_cases.h"
#include "trireme/base/error.h"
#include "trireme/comm/fake.h"
#include "trireme/comm/threads.h"

namespace trireme {
namespace {

using namespace std::chrono_literals;
using Groups = OnEveryWorld;
using SharedMemories = OnEveryWorld;

TEST_P(SharedMemories, OfOneIsTheSameForAllRanks) {
  run([](Rank& rank) {
    const auto memory = rank.world().memory_sharing()->share(5000, MemorySharing::Share::kOne);
    EXPECT_EQ(memory->bytes(), 5000u);
    EXPECT_EQ(memory->of(0), memory->of(rank.size() - 1));
    EXPECT_EQ(memory->of(0)[4999], std::byte(0));
    rank.world().barrier();
    memory->of(rank.id())[rank.id()] = std::byte(rank.id() + 1);
    rank.world().barrier();
    for (int peer = 0; peer < rank.size(); ++peer) EXPECT_EQ(memory->of(0)[peer], std::byte(peer + 1));
  });
}

TEST_P(SharedMemories, OfEachBelongsToOneRank) {
  run([](Rank& rank) {
    const auto memory = rank.world().memory_sharing()->share(3 << 20, MemorySharing::Share::kEach);
    memory->of(rank.id())[100] = std::byte(rank.id() + 1);
    rank.world().barrier();
    for (int peer = 0; peer < rank.size(); ++peer) {
      EXPECT_EQ(memory->of(peer)[100], std::byte(peer + 1));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->of(peer)) % 4096, 0u);
    }
  });
}

TEST_P(SharedMemories, ThatCannotBeMadeAreRefusedOnEveryRankWithTheReason) {
  run([](Rank& rank) {
    try {
      rank.world().memory_sharing()->share(size_t{1} << 60, MemorySharing::Share::kOne);  // beyond any address space
      FAIL();
    } catch (const Error& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("failed on rank 0: cannot "), std::string::npos) << text;
      EXPECT_NE(text.find(std::to_string(size_t{1} << 60)), std::string::npos) << text;
    }
  });
}

TEST_P(SharedMemories, OutlivesItsGroup) {
  run([](Rank& rank) {
    auto group = rank.world().clone("short-lived");
    const auto memory = group->memory_sharing()->share(64, MemorySharing::Share::kEach);
    group.reset();
    memory->of(rank.id())[0] = std::byte(7);
    rank.world().barrier();
    EXPECT_EQ(memory->of(0)[0], std::byte(7));
  });
}

TEST_P(Groups, SplitGivesMembersAGroupAndOthersNone) {
  run([](Rank& rank) {
    const int size = rank.size();
    std::vector<int> even;
    for (int peer = 0; peer < size; peer += 2) even.push_back(peer);
    const auto everybody = rank.world().clone("all");
    const auto group = rank.world().split({even}, "even");
    ASSERT_EQ(group != nullptr, rank.id() % 2 == 0);
    at::Tensor tensor = at::full({1000}, rank.id() + 1.0);
    if (group) {
      EXPECT_EQ(group->rank(), rank.id() / 2);
      EXPECT_EQ(group->name(), "even");
      group->all_reduce(tensor).wait();
      const int members = static_cast<int>(even.size());
      EXPECT_EQ(tensor[999].item<float>(), static_cast<float>(members * members));  // 1 + 3 + 5 + ...
    }
    at::Tensor ones = at::ones({10});
    everybody->all_reduce(ones).wait();
    EXPECT_EQ(ones[0].item<int>(), size);
  });
}

TEST_P(Groups, CompleteAsynchronousCallsInOrder) {
  run([](Rank& rank) {
    at::Tensor tensor = at::full({200000}, 1.0);
    std::vector<Pending<void>> pending;
    for (int index = 0; index < 5; ++index) pending.push_back(rank.world().all_reduce(tensor));  // 1, N, N^2, ...
    pending.back().wait();
    EXPECT_EQ(tensor[199999].item<float>(), std::pow(static_cast<float>(rank.size()), 5.0F));
    for (size_t index = 0; index + 1 < pending.size(); ++index) EXPECT_TRUE(pending[index].done());
    for (auto& each : pending) each.wait();
  });
}

TEST_P(Groups, CompleteWhatNobodyWaitsFor) {
  run([](Rank& rank) {
    at::Tensor tensor = at::ones({100});
    at::Tensor large = at::ones({500000});
    { const auto dropped = rank.world().all_reduce(tensor); }
    { const auto dropped = rank.world().all_reduce(large); }
    rank.world().barrier();
    EXPECT_EQ(tensor[99].item<int>(), rank.size());
    EXPECT_EQ(large[499999].item<int>(), rank.size());
  });
}

TRIREME_ON_EVERY_WORLD(Groups);
TRIREME_ON_EVERY_SHARED_WORLD(SharedMemories);

TEST(AsynchronousCall, MakesProgressWithoutItsCaller) {
  for (const int64_t numel : {int64_t{100}, int64_t{1} << 21}) {
    const auto body = [numel](Rank& rank) {
      at::Tensor whole = at::ones({numel});
      const at::Tensor own = whole.slice(0, 0, numel / 2);
      auto pending = rank.world().all_gather(whole, own);
      // Rank 0 is away until rank 1 is done.
      const auto memory_free = std::chrono::steady_clock::now() + 20s;
      if (rank.id() == 1) pending.wait();
      while (!pending.done() && std::chrono::steady_clock::now() < memory_free) std::this_thread::sleep_for(1ms);
      EXPECT_TRUE(pending.done());
    };
    for (const RankBackend backend : {RankBackend::kThreads, RankBackend::kC10d})
      run_ranks(2, body, {.backend = backend});
  }
}

TEST(WaitUntil, ReturnsWhenAPeerHasWrittenAndNotified) {
  run_ranks(3, [](Rank& rank) {
    MemorySharing& sharing = *rank.world().memory_sharing();
    const auto memory = sharing.share(64, MemorySharing::Share::kOne);
    auto& turn = *reinterpret_cast<std::atomic<int>*>(memory->of(0));
    for (int round = 0; round < 50; ++round) {
      const int mine = round * 3 + rank.id();
      sharing.wait_until([&] { return turn.load() == mine; }, {.peer = (rank.id() + 2) % 3, .operation = "turn"});
      if (round % 10 == 0) std::this_thread::sleep_for(2ms);  // longer than any spinning
      turn.store(mine + 1);
      sharing.notify();
    }
  });
}

TEST(WaitUntil, CostsOneLookWhenItIsReady) {
  auto groups = make_thread_groups(1);
  int looks = 0;
  groups[0]->memory_sharing()->wait_until([&] { return ++looks > 0; }, {.operation = "nothing"});
  EXPECT_EQ(looks, 1);
}

TEST(Counters, FollowTheCostLines) {
  for (const bool fake : {false, true}) {
    for (int size = 1; size <= 4; ++size) {
      const auto check = [&](Group& group) {
        const int64_t own = shard_range(10, size, group.rank()).numel();
        const int64_t others = size - 1;
        const auto sent = [&](const std::function<void()>& call) {
          const CommCounters before = group.counters();
          call();
          EXPECT_EQ(group.counters().calls, before.calls + 1);
          return (group.counters().bytes_sent - before.bytes_sent) / 4;
        };
        at::Tensor whole = at::zeros({10});
        at::Tensor shard = at::zeros({own});
        at::Tensor blocks = at::zeros({10 * size});
        at::Tensor blocks_out = at::zeros({10 * size});
        const bool root = group.rank() == 0;
        EXPECT_EQ(sent([&] { group.all_reduce(whole).wait(); }), 10 - own + others * own);
        EXPECT_EQ(sent([&] { group.reduce_scatter(shard, whole).wait(); }), 10 - own);
        EXPECT_EQ(sent([&] { group.all_gather(whole, shard).wait(); }), others * own);
        EXPECT_EQ(sent([&] { group.broadcast(whole, 0).wait(); }), root ? others * 10 : 0);
        EXPECT_EQ(sent([&] { group.all_to_all(blocks_out, blocks).wait(); }), others * 10);
        EXPECT_EQ(sent([&] { group.gather(blocks, whole, 0).wait(); }), root ? 0 : 10);
        EXPECT_EQ(sent([&] { group.scatter(whole, blocks, 0).wait(); }), root ? others * 10 : 0);
        EXPECT_EQ(sent([&] { group.barrier(); }), 0);
      };
      if (fake) {
        check(*make_fake_group(size - 1, size));
        continue;
      }
      for (const RankBackend backend : {RankBackend::kThreads, RankBackend::kC10d})
        run_ranks(size, [&](Rank& rank) { check(rank.world()); }, {.backend = backend});
    }
  }
}

TEST(FlightRecord, TellsTheLastOperationsOldestFirst) {
  const auto body = [](Rank& rank) {
    at::Tensor tensor = at::ones({12});
    for (int call = 0; call < 300; ++call) rank.world().all_reduce(tensor, ReduceOp::kMax).wait();
    rank.world().barrier();
    const std::string record = rank.world().flight_record();
    EXPECT_EQ(std::count(record.begin(), record.end(), '\n'), 256);
    EXPECT_EQ(record.find("all_reduce #46 (numel 12, float32, max) at "), 0u) << record.substr(0, 200);
    EXPECT_NE(record.find("barrier #301 at "), std::string::npos);
  };
  for (const RankBackend backend : {RankBackend::kThreads, RankBackend::kC10d})
    run_ranks(2, body, {.backend = backend});
}

TEST(Arguments, ThatDoNotFitAreShapeErrorsBeforeAnythingIsSent) {
  run_ranks(2, [](Rank& rank) {
    Group& group = rank.world();
    const at::Tensor ten = at::zeros({10});
    const at::Tensor three = at::zeros({3});
    EXPECT_THROW(group.all_gather(ten, three).wait(), ShapeError);
    EXPECT_THROW(group.reduce_scatter(three, ten).wait(), ShapeError);
    EXPECT_THROW(group.reduce_scatter(at::zeros({5}, at::kHalf), ten).wait(), ShapeError);
    EXPECT_THROW(group.all_reduce(at::zeros({4, 4}).t()[0]).wait(), ShapeError);
    EXPECT_THROW(group.all_reduce(at::Tensor()).wait(), ShapeError);
    EXPECT_THROW(group.all_reduce(at::zeros({4}, at::kInt), ReduceOp::kMean).wait(), ShapeError);
    EXPECT_THROW(group.all_reduce(at::zeros({4}, at::kBool)).wait(), ShapeError);
    EXPECT_THROW(group.all_reduce(at::zeros({4}, at::kComplexFloat)).wait(), ShapeError);
    EXPECT_THROW(group.broadcast(ten, 2).wait(), ShapeError);
    EXPECT_THROW(group.all_to_all(three, three).wait(), ShapeError);
    EXPECT_THROW(group.send(ten, rank.id()).wait(), ShapeError);
    EXPECT_THROW(group.split({{1, 0}}, "wrong"), ShapeError);
    EXPECT_EQ(group.counters().calls, 0);
    group.barrier();  // the group still works
  });
}

TEST(FakeGroup, MovesNothingAndNeverWaits) {
  auto group = make_fake_group(5, 64);
  at::Tensor whole = at::full({640}, 3.0);
  group->all_gather(whole, whole.slice(0, 0, 10)).wait();
  EXPECT_TRUE(at::equal(whole, at::full({640}, 3.0)));
  group->barrier();
  EXPECT_EQ(group->split({{1, 5}}, "pair")->rank(), 1);
  EXPECT_EQ(group->split({{1, 2}}, "others"), nullptr);
  EXPECT_EQ(group->memory_sharing(), nullptr);
}

}  // namespace
}  // namespace trireme
