#include <atomic>
#include <thread>

#include "tests/comm/collective_calls.h"
#include "tests/comm/collective_cases.h"
#include "tests/comm/thrown.h"
#include "tests/support/launcher_ends.h"
#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/comm/threads.h"

namespace trireme {
namespace {

using namespace std::chrono_literals;

/// With and without shared memory.
constexpr RankBackend kBothKinds[] = {RankBackend::kThreads, RankBackend::kC10d};

struct Divergence {
  const char* name;
  std::function<void(Group&)> most;  ///< what ranks 0 and 2 call
  std::function<void(Group&)> rank_1;
  const char* most_text;
  const char* rank_1_text;
};

TEST(DifferentCalls, AreNamedOnEveryRank) {
  const auto ones = [](int64_t numel, at::ScalarType dtype = at::kFloat) { return at::ones({numel}, dtype); };
  const std::vector<Divergence> cases{
      {"kind", [&](Group& g) { g.all_reduce(ones(6)).wait(); }, [&](Group& g) { g.barrier(); },
       "all_reduce #2 (numel 6, float32, sum)", "barrier #2"},
      {"numel", [&](Group& g) { g.all_reduce(ones(6)).wait(); }, [&](Group& g) { g.all_reduce(ones(7)).wait(); },
       "numel 6", "numel 7"},
      {"steps", [&](Group& g) { g.all_reduce(ones(6)).wait(); }, [&](Group& g) { g.all_reduce(ones(1 << 20)).wait(); },
       "numel 6", "numel 1048576"},
      {"dtype", [&](Group& g) { g.all_reduce(ones(6)).wait(); },
       [&](Group& g) { g.all_reduce(ones(6, at::kInt)).wait(); }, "float32", "int32"},
      {"op", [&](Group& g) { g.all_reduce(ones(6)).wait(); },
       [&](Group& g) { g.all_reduce(ones(6), ReduceOp::kMean).wait(); }, "sum", "mean"},
      {"root", [&](Group& g) { g.broadcast(ones(6), 0).wait(); }, [&](Group& g) { g.broadcast(ones(6), 1).wait(); },
       "root 0", "root 1"},
      {"share", [&](Group& g) { g.memory_sharing()->share(64, MemorySharing::Share::kOne); },
       [&](Group& g) { g.memory_sharing()->share(65, MemorySharing::Share::kOne); }, "numel 64", "numel 65"},
  };
  const auto check = [](const Divergence& divergence, RankBackend backend) {
    const auto body = [&](Rank& rank) {
      rank.world().barrier();
      const Thrown thrown =
          thrown_by([&] { rank.id() == 1 ? divergence.rank_1(rank.world()) : divergence.most(rank.world()); });
      EXPECT_EQ(thrown.code, ErrorCode::kDiverged) << divergence.name;
      EXPECT_TRUE(thrown.has(divergence.most_text)) << divergence.name << ": " << thrown.text;
      EXPECT_TRUE(thrown.has(divergence.rank_1_text)) << divergence.name << ": " << thrown.text;
      EXPECT_TRUE(thrown.has("rank 1 called")) << divergence.name << ": " << thrown.text;
    };
    run_ranks(3, body, {.backend = backend});
  };
  for (const Divergence& divergence : cases) {
    check(divergence, RankBackend::kThreads);
    if (std::string(divergence.name) != "share") check(divergence, RankBackend::kC10d);
  }
}

TEST(ALateRank, IsNamedWithWhatItWasLastSeenDoing) {
  for (const NamedCall& call : every_collective()) {
    std::atomic<bool> has_thrown{false};
    run_ranks(2,
              [&](Rank& rank) {
                at::Tensor tensor = at::ones({9});
                rank.world().all_reduce(tensor).wait();
                while (rank.id() == 1 && !has_thrown) std::this_thread::sleep_for(1ms);
                const Thrown thrown = thrown_by([&] {
                  call.run(rank.world(), 1000);  // the late rank may have all it needs: then its next call throws
                  if (rank.id() == 1) call.run(rank.world(), 1000);
                });
                has_thrown = true;
                EXPECT_EQ(thrown.code, ErrorCode::kTimeout) << call.name << " " << thrown.text;
                EXPECT_TRUE(thrown.has("rank 1 did not arrive while rank 0 waited for it in ")) << thrown.text;
                EXPECT_TRUE(thrown.has("rank 1 was last in all_reduce #1 (numel 9, float32, sum)")) << thrown.text;
                EXPECT_TRUE(thrown.has("group 'world' after ")) << thrown.text;
              },
              {.timeout = 600ms});  // of every wait here: a busy machine starts a thread late
  }
}

TEST(AfterAnError, EveryCallThrowsTheFirstOneAtOnce) {
  const auto body = [](Rank& rank) {
    const Thrown first = thrown_by([&] {
      at::Tensor tensor = at::ones({rank.id() + 1});
      rank.world().all_reduce(tensor).wait();
    });
    for (const NamedCall& call : every_collective()) {
      const Thrown again = thrown_by([&] { call.run(rank.world(), 10); });
      EXPECT_EQ(again.code, ErrorCode::kDiverged) << call.name;
      EXPECT_EQ(again.text, first.text) << call.name;
    }
    MemorySharing* const sharing = rank.world().memory_sharing();
    if (sharing == nullptr) return;
    EXPECT_EQ(thrown_by([&] { sharing->wait_until([] { return false; }, {.operation = "never"}); }).text, first.text);
  };
  for (const RankBackend backend : kBothKinds) run_ranks(2, body, {.backend = backend});
}

TEST(AfterAnError, ItSaysWhichMethodAndWhatItWasAbout) {
  const auto body = [](Rank& rank) {
    const CallerScope outer(rank.id() == 0 ? "save_checkpoint" : "step");
    const CallerScope inner("backward");
    const SubjectScope subject("layers.3");
    at::Tensor tensor = at::ones({rank.id() + 1});
    const Thrown thrown = thrown_by([&] { rank.world().all_reduce(tensor).wait(); });
    EXPECT_TRUE(thrown.has("all_reduce #1 (numel 1, float32, sum) of layers.3 in save_checkpoint")) << thrown.text;
    EXPECT_TRUE(thrown.has("all_reduce #1 (numel 2, float32, sum) of layers.3 in step")) << thrown.text;
  };
  for (const RankBackend backend : kBothKinds) run_ranks(2, body, {.backend = backend});
}

TEST(DifferentSubjects, AreDifferentOperations) {
  run_ranks(2, [](Rank& rank) {
    at::Tensor tensor = at::ones({4});
    {
      const SubjectScope same("the same");
      rank.world().all_reduce(tensor).wait();
    }
    const std::string unit = std::string(60, 'x') + (rank.id() == 0 ? ".0" : ".1");  // its end tells them apart
    const SubjectScope subject(unit);
    const Thrown thrown = thrown_by([&] { rank.world().all_reduce(tensor).wait(); });
    EXPECT_EQ(thrown.code, ErrorCode::kDiverged);
    EXPECT_TRUE(thrown.has("x.0")) << thrown.text;
    EXPECT_TRUE(thrown.has("x.1")) << thrown.text;
  });
}

TEST(ARankThatLeaves, IsNamedByWhoeverWaitsForIt) {
  auto groups = make_thread_groups(2, {.name = "pair"});
  groups[0]->memory_sharing()->notify();
  groups[1].reset();
  const Thrown thrown = thrown_by([&] { groups[0]->barrier(); });
  EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
  EXPECT_TRUE(thrown.has("rank 1 left while rank 0 waited for it in barrier #1 of group 'pair'")) << thrown.text;
}

TEST(ARankThatLeaves, MayDoSoWhilePeersAreStillInTheLastCall) {
  for (int round = 0; round < 20; ++round) {
    run_ranks(3, [](Rank& rank) {
      if (rank.id() == 2) std::this_thread::sleep_for(5ms);
      at::Tensor tensor = at::ones({200000});
      rank.world().broadcast(tensor, 0).wait();
    });
  }
}

TEST(ARankThatLosesAPeer, TellsTheLauncherThePeersRankInTheWorld) {
  for (const RankBackend backend : kBothKinds) {
    const LauncherEnds launcher;
    run_ranks(4,
              [&](Rank& rank) {
                const auto odd = rank.world().split({{1, 3}}, "odd");
                const auto pair = odd ? odd->split({{0, 1}}, "pair") : nullptr;
                if (rank.id() == 3) pair->abort("no more data");
                if (rank.id() == 1) thrown_by([&] { pair->barrier(); });
                rank.world().barrier();
              },
              {.backend = backend});
    const auto told = launcher.told();
    ASSERT_TRUE(told);
    EXPECT_EQ(told->code, ErrorCode::kPeerLost);
    EXPECT_EQ(told->peer, 3);
  }
}

TEST(AnAbort, ReachesAPeerInAWait) {
  run_ranks(2, [](Rank& rank) {
    if (rank.id() == 1) {
      std::this_thread::sleep_for(50ms);
      rank.world().abort("no more data");
    }
    const Thrown thrown = thrown_by(
        [&] { rank.world().memory_sharing()->wait_until([] { return false; }, {.peer = 1, .operation = "grads"}); });
    EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
    EXPECT_TRUE(thrown.has("no more data")) << thrown.text;
  });
}

TEST(RunRanks, ReportsTheRankThatThrewAndNotItsPeers) {
  try {
    run_ranks(3, [](Rank& rank) {
      if (rank.id() == 2) throw ShapeError("expected a trireme, got a raft");
      rank.world().barrier();
    });
    FAIL() << "no error";
  } catch (const ShapeError& error) {
    EXPECT_STREQ(error.what(), "rank 2: expected a trireme, got a raft");
  }
}

TEST(AGroup, CanBeDestroyedWithCallsUnderWay) {
  auto groups = make_thread_groups(2);
  at::Tensor small = at::ones({10});
  at::Tensor large = at::ones({1 << 20});
  auto first = groups[0]->all_reduce(small);
  auto second = groups[0]->all_reduce(large);
  auto third = groups[0]->recv(large, 1);
  groups[0].reset();
  EXPECT_THROW(first.wait(), StateError);
  EXPECT_THROW(second.wait(), StateError);
  EXPECT_THROW(third.wait(), StateError);
  const Thrown thrown = thrown_by([&] {
    groups[1]->all_reduce(small).wait();  // as far as rank 0 got with it
    groups[1]->all_reduce(large).wait();
  });
  EXPECT_EQ(thrown.code, ErrorCode::kPeerLost) << thrown.text;
}

}  // namespace
}  // namespace trireme
