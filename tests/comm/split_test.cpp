// Groups of some of a group's ranks: which parts there may be, who is in which, what they are called in errors.
#include <atomic>
#include <deque>
#include <thread>

#include "comm/backends/c10d/group_numbers.h"
#include "tests/comm/collective_cases.h"
#include "tests/comm/thrown.h"
#include "trireme/comm/fake.h"
#include "trireme/comm/threads.h"

namespace trireme {
namespace {

using namespace std::chrono_literals;
using Splits = OnEveryWorld;

TEST_P(Splits, GiveEveryPartAGroupInOneCollective) {
  run([](Rank& rank) {
    std::vector<std::vector<int>> parts(rank.size() > 1 ? 2 : 1);
    for (int peer = 0; peer < rank.size(); ++peer) parts[static_cast<size_t>(peer) % parts.size()].push_back(peer);
    const auto& own = parts[static_cast<size_t>(rank.id()) % parts.size()];
    const CommCounters before = rank.world().counters();
    const auto group = rank.world().split(parts, "part");
    EXPECT_EQ(rank.world().counters().calls, before.calls + 1);
    ASSERT_EQ(group->size(), static_cast<int>(own.size()));
    EXPECT_EQ(own[static_cast<size_t>(group->rank())], rank.id());
    const at::Tensor sum = at::full({1000}, rank.id() + 1.0);
    group->all_reduce(sum).wait();
    int expected = 0;
    for (const int member : own) expected += member + 1;
    EXPECT_EQ(sum[999].item<int>(), expected);
  });
}

TEST_P(Splits, MayBeSplitAgain) {
  run([](Rank& rank) {
    if (rank.size() != 4) return;
    const auto half = rank.world().split({{0, 2}, {1, 3}}, "half");
    const auto alone = half->split({{0}, {1}}, "alone");
    EXPECT_EQ(half->world_rank(0), rank.id() % 2);
    EXPECT_EQ(half->world_rank(1), rank.id() % 2 + 2);
    EXPECT_EQ(alone->world_rank(0), rank.id());
    EXPECT_EQ(rank.world().world_rank(3), 3);
  });
}

TRIREME_ON_EVERY_WORLD(Splits);

TEST(Clone, HasAllRanksAndASequenceOfItsOwn) {
  run_ranks(3, [](Rank& rank) {
    const auto clone = rank.world().clone("second");
    EXPECT_EQ(clone->name(), "second");
    EXPECT_EQ(clone->rank(), rank.id());
    EXPECT_EQ(clone->size(), 3);
    const at::Tensor first = at::ones({10}), second = at::ones({20});
    auto one = rank.id() == 0 ? rank.world().all_reduce(first) : clone->all_reduce(second);
    auto other = rank.id() == 0 ? clone->all_reduce(second) : rank.world().all_reduce(first);
    one.wait();
    other.wait();
    EXPECT_EQ(first[9].item<int>() + second[19].item<int>(), 6);
  });
}

TEST(PartsOfASplit, ThatDoNotFitAreNamed) {
  const auto group = make_fake_group(1, 4);
  const auto refusal = [&](const std::vector<std::vector<int>>& parts) {
    const Thrown thrown = thrown_by([&] { (void)group->split(parts, "part"); });
    EXPECT_EQ(thrown.code, ErrorCode::kShape) << thrown.text;
    return thrown.text;
  };
  EXPECT_EQ(refusal({}), "split of group 'fake': expected at least one part, got none");
  EXPECT_EQ(refusal({{0, 1}, {}}), "split of group 'fake': part 1 has no ranks; leave it out");
  EXPECT_EQ(refusal({{0, 1}, {2, 7}}), "split of group 'fake': part 1 names rank 7; the group has ranks 0 to 3");
  EXPECT_EQ(refusal({{0, -1}}), "split of group 'fake': part 0 names rank -1; the group has ranks 0 to 3");
  EXPECT_EQ(refusal({{0, 2}, {1, 2}}),
            "split of group 'fake': rank 2 stands in part 0 and in part 1; name each rank once");
  EXPECT_EQ(refusal({{1, 1}}), "split of group 'fake': rank 1 stands in part 0 twice; name each rank once");
  EXPECT_EQ(refusal({{3, 2}}),
            "split of group 'fake': part 0 names rank 3 before rank 2; name its ranks in ascending order");
  EXPECT_EQ(group->counters().calls, 0);
}

TEST(PartsOfASplit, ThatDifferBetweenRanksAreADivergence) {
  for (const RankBackend backend : {RankBackend::kThreads, RankBackend::kC10d})
    run_ranks(3,
              [](Rank& rank) {
                const std::vector<std::vector<int>> most{{0, 1}, {2}}, others{{0}, {1, 2}};
                const Thrown thrown =
                    thrown_by([&] { (void)rank.world().split(rank.id() == 1 ? others : most, "part"); });
                EXPECT_EQ(thrown.code, ErrorCode::kDiverged) << thrown.text;
                EXPECT_TRUE(thrown.has("rank 1 called split #1 (fingerprint of the parts ")) << thrown.text;
              },
              {.backend = backend});
}

TEST(ErrorsOfAPart, NameItsRanksAndTheirRanksInTheWorld) {
  for (const RankBackend backend : {RankBackend::kThreads, RankBackend::kC10d})
    run_ranks(6,
              [](Rank& rank) {
                const auto part = rank.world().split({{0, 1}, {2, 5}, {3, 4}}, "pipe1/data");
                if (part->world_rank(0) != 2) return;
                const Thrown thrown = thrown_by([&] { part->all_reduce(at::ones({rank.id() + 1})).wait(); });
                EXPECT_EQ(thrown.code, ErrorCode::kDiverged) << thrown.text;
                EXPECT_TRUE(thrown.has("in group 'pipe1/data'")) << thrown.text;
                EXPECT_TRUE(thrown.has("rank 0 (world rank 2) called all_reduce #1 (numel 3")) << thrown.text;
                EXPECT_TRUE(thrown.has("rank 1 (world rank 5) called all_reduce #1 (numel 6")) << thrown.text;
              },
              {.backend = backend});
}

TEST(ErrorsOfAPart, NameTheWorldRankOfAPeerThatIsLate) {
  std::atomic<bool> has_thrown{false};
  run_ranks(3,
            [&](Rank& rank) {
              const auto part = rank.world().split({{0}, {1, 2}}, "late");
              while (rank.id() == 2 && !has_thrown) std::this_thread::sleep_for(1ms);
              if (rank.id() != 1) return;
              const Thrown thrown = thrown_by([&] { part->barrier(); });
              has_thrown = true;
              EXPECT_EQ(thrown.code, ErrorCode::kTimeout) << thrown.text;
              EXPECT_TRUE(thrown.has("rank 1 (world rank 2) did not arrive while rank 0 (world rank 1) waited for it"))
                  << thrown.text;
            },
            {.timeout = 600ms});
}

/// The numbers of `ranks` ranks, each of which knows of its own groups alone.
class NumbersOfRanks {
 public:
  explicit NumbersOfRanks(int ranks) {
    for (int rank = 0; rank < ranks; ++rank) numbers_.push_back(std::make_shared<comm::GroupNumbers>());
  }
  /// The number that all of `members` agree on; -1: there is none. They must agree.
  int agree(const std::vector<int>& members) {
    std::vector<comm::GroupNumbers::View> views;
    for (const int member : members) views.push_back(of(member).view());
    const int number = of(members.front()).agree(views).value_or(-1);
    for (size_t i = 1; i < members.size(); ++i) EXPECT_EQ(of(members[i]).agree(views).value_or(-1), number);
    return number;
  }
  std::vector<comm::GroupNumbers::Lease> take(const std::vector<int>& members, int number) {
    std::vector<comm::GroupNumbers::Lease> leases;
    for (const int member : members) leases.push_back(of(member).take(number));
    return leases;
  }

 private:
  comm::GroupNumbers& of(int rank) { return *numbers_[static_cast<size_t>(rank)]; }
  std::vector<std::shared_ptr<comm::GroupNumbers>> numbers_;
};

TEST(NumbersOfGroups, AreNotGivenAgainWhileAGroupThatHasOneLives) {
  NumbersOfRanks ranks(3);
  const std::vector<int> all{0, 1, 2};
  const int held = ranks.agree(all);
  auto lease = ranks.take({1}, held);  // ranks 0 and 2 have destroyed theirs
  std::deque<std::vector<comm::GroupNumbers::Lease>> living;
  for (int round = 0; round < 2000; ++round) {
    const int number = ranks.agree(all);
    ASSERT_GE(number, 0);
    ASSERT_NE(number, held);
    for (const auto& other : living) ASSERT_NE(number, other.front().number());
    living.push_back(ranks.take(all, number));
    if (living.size() == 500) living.pop_front();
  }
}

TEST(NumbersOfGroups, RunOutAndComeBack) {
  NumbersOfRanks ranks(2);
  std::vector<std::vector<comm::GroupNumbers::Lease>> living;
  for (int count = 0; count < comm::GroupNumbers::kCount; ++count)
    living.push_back(ranks.take({0, 1}, ranks.agree({0, 1})));
  EXPECT_EQ(ranks.agree({0, 1}), -1);
  const int freed = living[100].front().number();
  living[100].pop_back();  // of one rank alone
  EXPECT_EQ(ranks.agree({0, 1}), -1);
  living[100].clear();
  EXPECT_EQ(ranks.agree({0, 1}), freed);
}

TEST(NumbersOfGroups, ThatPeersMayStillSendUnderAreKept) {
  NumbersOfRanks ranks(1);
  const int kept = ranks.agree({0});
  auto lease = ranks.take({0}, kept);
  lease.front().keep();
  lease.clear();
  for (int round = 0; round < 2 * comm::GroupNumbers::kCount; ++round) EXPECT_NE(ranks.agree({0}), kept);
}

TEST(GroupsOverC10d, AreRefusedByNameWhereAllNumbersAreTaken) {
  run_ranks(2,
            [](Rank& rank) {
              std::vector<std::unique_ptr<Group>> clones;
              for (int count = 1; count < comm::GroupNumbers::kCount; ++count)
                clones.push_back(rank.world().clone("one"));
              const Thrown thrown = thrown_by([&] { (void)rank.world().clone("too many"); });
              EXPECT_EQ(thrown.code, ErrorCode::kState) << thrown.text;
              EXPECT_TRUE(thrown.has("split of group 'world': the ranks have 512 groups")) << thrown.text;
              clones.erase(clones.begin() + 99);
              rank.world().barrier();
              const auto again = rank.world().clone("again");
              // The groups beside it have tags of their own.
              const at::Tensor sum = at::ones({4}), other = at::full({4}, 5.0);
              auto pending = clones[99]->all_reduce(other);
              again->all_reduce(sum).wait();
              pending.wait();
              EXPECT_EQ(sum[0].item<int>(), 2);
              EXPECT_EQ(other[0].item<int>(), 10);
            },
            {.backend = RankBackend::kC10d});
}

}  // namespace
}  // namespace trireme
