// Traits of groups over a process group of c10d: peers that are late or gone, tags, manners of backends.
#include <atomic>
#include <future>
#include <thread>

#include "tests/comm/collective_calls.h"
#include "tests/comm/collective_cases.h"
#include "tests/comm/thrown.h"
#include "tests/support/process_groups.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/c10d.h"

namespace trireme {
namespace {

using namespace std::chrono_literals;
using GroupsByRank = std::vector<std::unique_ptr<Group>>;

GroupsByRank groups_over(const ThreadProcessGroups& process_groups, const C10dGroupOptions& options = {}) {
  GroupsByRank groups;
  for (const auto& process_group : process_groups.groups) groups.push_back(make_c10d_group(process_group, options));
  return groups;
}

/// Runs `body` for every rank that has a group, each in a thread.
std::vector<Thrown> on_each(const GroupsByRank& groups, const std::function<void(Group&)>& body) {
  std::vector<std::future<Thrown>> ended;
  for (const auto& group : groups)
    ended.push_back(std::async(std::launch::async,
                               [&body, &group] { return group ? thrown_by([&] { body(*group); }) : Thrown{}; }));
  std::vector<Thrown> thrown;
  for (auto& each : ended) thrown.push_back(each.get());
  return thrown;
}

TEST(ALatePeer, IsNamedWithWhatItWasLastSeenDoing) {
  for (const BackendManners manners : {BackendManners::kGloo, BackendManners::kMpi}) {
    for (const NamedCall& call : every_collective()) {
      const auto groups = groups_over(make_process_groups(2, manners), {.name = "far", .timeout = 300ms});
      const auto thrown = on_each(groups, [&](Group& group) {
        at::Tensor tensor = at::ones({9});
        group.all_reduce(tensor).wait();
        if (group.rank() == 0) call.run(group, 1000);
      })[0];
      EXPECT_EQ(thrown.code, ErrorCode::kTimeout) << call.name << " " << thrown.text;
      EXPECT_TRUE(thrown.has("rank 1 did not arrive while rank 0 waited for it in ")) << thrown.text;
      EXPECT_TRUE(thrown.has(call.name == "recv" ? "#1 (numel 1000, float32, root 1) of group 'far' after "
                                                 : call.name + " #2"))
          << thrown.text;
      EXPECT_TRUE(thrown.has("rank 1 was last in all_reduce #1 (numel 9, float32, sum)")) << thrown.text;
    }
  }
}

TEST(ALatePeer, IsNamedInOneWarningWhileItIsWaitedFor) {
  for (const std::string call : {"all_reduce", "recv"}) {
    std::atomic<int> warnings{0};
    std::string text;
    const LogSink former = set_log_sink([&](LogLevel, const std::string& message) {
      text = message;
      ++warnings;
    });
    const auto groups = groups_over(make_process_groups(2), {.name = "far", .warn_after = 50ms});
    const auto thrown = on_each(groups, [&](Group& group) {
      at::Tensor tensor = at::ones({9});
      group.all_reduce(tensor).wait();
      while (group.rank() == 1 && warnings == 0) std::this_thread::sleep_for(1ms);
      if (group.rank() == 1) std::this_thread::sleep_for(100ms);  // for a second warning that must not come
      collective(call).run(group, 1000);
    });
    set_log_sink(former);
    for (const Thrown& each : thrown) EXPECT_EQ(each.text, Thrown{}.text);
    EXPECT_EQ(warnings, 1);
    EXPECT_NE(text.find("comm: rank 0 waits for rank 1 in " + call), std::string::npos) << text;
    EXPECT_NE(text.find("rank 1 was last in all_reduce #1 (numel 9, float32, sum)"), std::string::npos) << text;
  }
}

TEST(ALostPeer, IsNamedByEverySurvivorInEveryCollective) {
  for (const NamedCall& call : every_collective()) {
    auto process_groups = make_process_groups(3);
    const auto groups = groups_over(process_groups);
    const auto thrown = on_each(groups, [&](Group& group) {
      group.barrier();
      if (group.rank() != 1) return call.run(group, 1000);
      std::this_thread::sleep_for(20ms);
      process_groups.lose(1);
    });
    for (const int rank : {0, 2}) {
      // A rank that exchanges messages with the survivor only may learn of it from that one.
      const Thrown& each = thrown[static_cast<size_t>(rank)];
      EXPECT_EQ(each.code, ErrorCode::kPeerLost) << call.name << " " << each.text;
      EXPECT_TRUE(each.has("rank 1 was lost while rank ")) << each.text;
      EXPECT_TRUE(each.has("the process group says: Connection closed by peer")) << each.text;
      EXPECT_FALSE(each.has("and a stack")) << each.text;
    }
  }
}

TEST(AnAbortOverC10d, ReachesPeersThatWaitAndPeersThatCome) {
  const auto groups = groups_over(make_process_groups(3));
  const auto thrown = on_each(groups, [](Group& group) {
    if (group.rank() == 1) {
      std::this_thread::sleep_for(20ms);
      return group.abort("no more data");
    }
    if (group.rank() == 2) std::this_thread::sleep_for(60ms);
    group.barrier();
  });
  for (const int rank : {0, 2}) {
    const Thrown& each = thrown[static_cast<size_t>(rank)];
    EXPECT_EQ(each.code, ErrorCode::kPeerLost) << each.text;
    EXPECT_TRUE(each.has(str("rank 1 failed while rank ", rank, " was in barrier #1 of group 'world': rank 1 gave up")))
        << each.text;
    EXPECT_TRUE(each.has("no more data")) << each.text;
  }
  EXPECT_TRUE(thrown_by([&] { groups[1]->barrier(); }).has("no more data"));
}

TEST(AnAbortOverC10d, IsHeardWhenTheGroupThatGaveUpIsGone) {
  auto groups = groups_over(make_process_groups(2), {.timeout = 5s});
  groups[1]->abort("no more data");
  groups[1].reset();
  const Thrown thrown = thrown_by([&] { groups[0]->barrier(); });
  EXPECT_EQ(thrown.code, ErrorCode::kPeerLost);
  EXPECT_TRUE(thrown.has("no more data")) << thrown.text;
}

TEST(AC10dGroup, CanBeDestroyedWithCallsUnderWay) {
  for (const BackendManners manners : {BackendManners::kGloo, BackendManners::kMpi}) {
    auto groups = groups_over(make_process_groups(2, manners));
    at::Tensor tensor = at::ones({10});
    auto first = groups[0]->all_reduce(tensor);
    auto second = groups[0]->all_reduce(tensor);
    auto third = groups[0]->recv(tensor, 1);
    std::this_thread::sleep_for(10ms);
    groups[0].reset();
    EXPECT_THROW(first.wait(), StateError);
    EXPECT_THROW(second.wait(), StateError);
    EXPECT_THROW(third.wait(), StateError);
  }
}

TEST(AC10dGroup, SharesNoMemory) {
  const auto groups = groups_over(make_process_groups(1));
  EXPECT_EQ(groups[0]->memory_sharing(), nullptr);
}

TEST(AC10dGroup, RefusesAProcessGroupThatMovesNothingOnTheHost) {
  const Thrown thrown = thrown_by([] { make_c10d_group(make_gpu_process_group()); });
  EXPECT_EQ(thrown.code, ErrorCode::kUnsupported);
  EXPECT_TRUE(thrown.has("backend nccl")) << thrown.text;
  EXPECT_TRUE(thrown.has("cpu:gloo,cuda:nccl")) << thrown.text;
}

TEST(AC10dGroup, WorksOverABackendThatMustBePolled) {
  const auto groups = groups_over(make_process_groups(3, BackendManners::kMpi));
  const auto thrown = on_each(groups, [](Group& group) {
    at::Tensor tensor = at::full({50000}, group.rank() + 1.0);
    group.all_reduce(tensor).wait();
    EXPECT_EQ(tensor[49999].item<int>(), 6);
  });
  for (const Thrown& each : thrown) EXPECT_EQ(each.text, "nothing was thrown");
}

/// Groups whose calls are under way at once: had two of them the same tags, they would take each other's data.
TEST(GroupsOverOneProcessGroup, DoNotMix) {
  const auto process_groups = make_process_groups(3);
  const auto first = groups_over(process_groups, {.name = "first"});
  const auto second = groups_over(process_groups, {.name = "second"});
  const auto thrown = on_each(first, [&](Group& group) {
    std::vector<Group*> all{&group, second[static_cast<size_t>(group.rank())].get()};
    std::vector<std::unique_ptr<Group>> splits;
    // Ranks 0 and 1 split what rank 2 has no part in, so that they know a number that is new to it.
    const auto pair = group.split({{0, 1}}, "pair");
    const auto within = pair ? pair->split({{0, 1}}, "within") : nullptr;
    for (int index = 0; index < 2; ++index) splits.push_back(group.clone("all"));
    for (const auto& split : splits) all.push_back(split.get());
    std::vector<at::Tensor> tensors;
    std::vector<Pending<void>> pending;
    for (size_t index = 0; index < all.size(); ++index)
      tensors.push_back(at::full({20000}, group.rank() + 10.0 * static_cast<double>(index)));
    // Each rank begins elsewhere.
    for (size_t turn = 0; turn < all.size(); ++turn) {
      const size_t index = (turn + static_cast<size_t>(group.rank())) % all.size();
      pending.push_back(all[index]->all_reduce(tensors[index]));
    }
    for (auto& each : pending) each.wait();
    for (size_t index = 0; index < all.size(); ++index)
      EXPECT_EQ(tensors[index][19999].item<int>(), 3 + 30 * static_cast<int>(index));
  });
  for (const Thrown& each : thrown) EXPECT_EQ(each.text, "nothing was thrown");
}

}  // namespace
}  // namespace trireme
