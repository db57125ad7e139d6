// join(): shared memory or a process group, and what says so.
#include <future>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/host_record.h"
#include "tests/comm/collective_cases.h"
#include "tests/support/captured_log.h"
#include "tests/support/process_groups.h"
#include "trireme/base/error.h"
#include "trireme/comm/world.h"

namespace trireme {
namespace {

using comm::HostRecord;

/// A rank's result of join(): a world, or an error.
struct Joined {
  World world;
  std::string error = {};
};

std::vector<Joined> join_all(const std::vector<JoinOptions>& options, bool with_process_groups = true) {
  const int size = static_cast<int>(options.size());
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto process_groups = make_process_groups(size);
  std::vector<std::future<Joined>> joining;
  for (const JoinOptions& own : options)
    joining.push_back(std::async(std::launch::async, [&, own] {
      try {
        const auto& group = process_groups.groups[static_cast<size_t>(own.rank)];
        return Joined{join(store, with_process_groups ? group : nullptr, own)};
      } catch (const Error& error) {
        return Joined{{}, error.what()};
      }
    }));
  std::vector<Joined> joined;
  for (auto& each : joining) joined.push_back(each.get());
  return joined;
}

std::vector<JoinOptions> ranks(int size, Transport transport = Transport::kAuto) {
  std::vector<JoinOptions> options;
  for (int rank = 0; rank < size; ++rank)
    options.push_back({.rank = rank, .size = size, .transport = transport, .timeout = std::chrono::seconds(20)});
  return options;
}

TEST(Join, TakesSharedMemoryOnOneHost) {
  const CapturedLog log;
  const auto joined = join_all(ranks(3), false);
  for (int rank = 0; rank < 3; ++rank) {
    const World& world = joined[static_cast<size_t>(rank)].world;
    ASSERT_TRUE(world.group) << joined[static_cast<size_t>(rank)].error;
    EXPECT_NE(world.group->memory_sharing(), nullptr);
    EXPECT_EQ(world.group->rank(), rank);
    EXPECT_EQ(world.local_rank, rank);
    EXPECT_EQ(world.local_size, 3);
  }
  EXPECT_EQ(log.text(), "info comm: shared memory among 3 ranks of host " + HostRecord::of_this_process().host + "\n");
}

TEST(Join, TakesTheProcessGroupWhenToldTo) {
  const CapturedLog log;
  const auto joined = join_all(ranks(2, Transport::kC10d));
  for (const Joined& each : joined) {
    ASSERT_TRUE(each.world.group) << each.error;
    EXPECT_EQ(each.world.group->memory_sharing(), nullptr);
    EXPECT_EQ(each.world.local_size, 2);
  }
  EXPECT_EQ(log.text(), "info comm: c10d process group (gloo) among 2 ranks on host " +
                            HostRecord::of_this_process().host + "; as TRIREME_COMM or the program's transport says\n");
}

TEST(Join, MayBeCalledAgain) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  for (int time = 0; time < 2; ++time) EXPECT_EQ(join(store, nullptr, {.rank = 0, .size = 1}).size, 1);
}

TEST(Join, TellsEveryRankOfDifferentTransports) {
  auto options = ranks(2);
  options[1].transport = Transport::kC10d;
  for (const Joined& each : join_all(options))
    EXPECT_NE(each.error.find("rank 0 joins with transport auto, rank 1 with c10d"), std::string::npos) << each.error;
}

TEST(Join, RefusesWhatDoesNotFit) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THROW(join(store, nullptr, {.rank = 2, .size = 2}), ConfigError);
  EXPECT_THROW(join(nullptr, nullptr, {.rank = 0, .size = 1}), ConfigError);
  EXPECT_THROW(join(store, make_process_groups(2).groups[1], {.rank = 0, .size = 2}), ConfigError);
  EXPECT_THROW(join(store, nullptr, {.rank = 0, .size = 1, .transport = Transport::kC10d}), ConfigError);
}

HostRecord record(const std::string& host, const std::string& pid_namespace = "pid:[1]") {
  HostRecord made;
  made.host = host;
  made.boot_id = "boot-of-" + host;
  made.pid_namespace = pid_namespace;
  return made;
}

TEST(HostRecords, TellWhyRanksCannotShareMemory) {
  EXPECT_EQ(comm::obstacle_to_sharing({record("oar"), record("oar")}), "");
  EXPECT_EQ(comm::obstacle_to_sharing({record("oar"), record("mast")}), "rank 0 runs on host oar, rank 1 on host mast");
  EXPECT_NE(comm::obstacle_to_sharing({record("oar"), record("oar", "pid:[2]")}).find("different containers"),
            std::string::npos);
}

TEST(HostRecords, GiveLocalRanksAndTheNamesOfHosts) {
  const std::vector<HostRecord> records{record("a"), record("b"), record("a"), record("a"), record("b")};
  const std::vector<std::pair<int, int>> expected{{0, 3}, {0, 2}, {1, 3}, {2, 3}, {1, 2}};
  for (int rank = 0; rank < 5; ++rank) {
    const comm::Place place = comm::local_place(records, rank);
    EXPECT_EQ(std::pair(place.rank, place.size), expected[static_cast<size_t>(rank)]) << rank;
  }
  EXPECT_EQ(comm::hosts_of(records), "2 hosts: a, b");
  EXPECT_EQ(comm::hosts_of({record("a")}), "host a");
}

TEST(HostRecords, TravelAsText) {
  HostRecord sent = record("oar");
  sent.transport = Transport::kC10d;
  sent.ticket = {.pid = 7, .handle = 8, .bytes = 9, .mark = {10, 11}};
  EXPECT_EQ(HostRecord::parse(sent.text()).text(), sent.text());
}

TEST(HostRecords, ThatNobodySendsAreRefused) {
  for (const char* text : {"", "oar", "oar boot pid:[1] 0 7 8 9 10", "oar boot pid:[1] 3 7 8 9 10 11",
                           "oar boot pid:[1] 0 7 8 9 10 11 12", "oar boot pid:[1] 0 x 8 9 10 11"})
    EXPECT_THROW(HostRecord::parse(text), IoError) << text;
  EXPECT_NO_THROW(HostRecord::parse("oar boot pid:[1] 0 7 8 9 10 11"));
}

}  // namespace
}  // namespace trireme
