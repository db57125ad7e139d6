#include "trireme/observe/comms_log.h"

#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "trireme/base/log.h"

namespace trireme {
namespace {

using std::chrono::milliseconds;

Notice call(std::string_view operation, int64_t bytes, int ranks, milliseconds took) {
  return {.kind = Notice::Kind::kCollective,
          .name = operation,
          .subject = "layers.3",
          .caller = "backward",
          .group = "world",
          .group_size = ranks,
          .bytes = bytes,
          .begin = {},
          .end = Notice::Clock::time_point(took)};
}

TEST(CommsLog, AddsUpTheCallsOfEachSize) {
  CommsLog log({.enabled = true});
  log.hear(call("all_reduce", 1000, 4, milliseconds(2)));
  log.hear(call("all_reduce", 1000, 4, milliseconds(6)));
  log.hear(call("all_reduce", 500, 4, milliseconds(1)));
  log.hear(call("broadcast", 500, 4, milliseconds(1)));
  const auto entries = log.entries();
  ASSERT_EQ(entries.size(), 3);
  EXPECT_EQ(entries[0].bytes, 500);
  EXPECT_EQ(entries[1].bytes, 1000);
  EXPECT_EQ(entries[1].count, 2);
  EXPECT_DOUBLE_EQ(entries[1].seconds, 0.008);
  EXPECT_DOUBLE_EQ(entries[1].min_seconds, 0.002);
  EXPECT_EQ(entries[2].operation, "broadcast");
  log.clear();
  EXPECT_TRUE(log.entries().empty());
}

// By hand: 10^6 bytes in 1 ms are 8 Gbit/s.
TEST(CommsLog, TellsBandwidths) {
  CommsLog log({.enabled = true});
  for (const char* operation : {"all_gather", "all_reduce", "broadcast"})
    log.hear(call(operation, 1'000'000, 4, milliseconds(1)));
  const auto entries = log.entries();
  ASSERT_EQ(entries.size(), 3);
  for (const CommsLogEntry& entry : entries) EXPECT_DOUBLE_EQ(entry.algorithm_gbps(), 8);
  EXPECT_DOUBLE_EQ(entries[0].bus_gbps(), 6);   // 3/4
  EXPECT_DOUBLE_EQ(entries[1].bus_gbps(), 12);  // 6/4
  EXPECT_DOUBLE_EQ(entries[2].bus_gbps(), 8);
}

TEST(CommsLog, CountsTheOperationsThatAreAskedFor) {
  CommsLog log({.enabled = true, .prof_all = false, .prof_ops = {"broadcast"}});
  log.hear(call("all_reduce", 1000, 4, milliseconds(2)));
  log.hear(call("broadcast", 1000, 4, milliseconds(2)));
  ASSERT_EQ(log.entries().size(), 1);
  EXPECT_EQ(log.entries()[0].operation, "broadcast");
}

TEST(CommsLog, KnowsTheFormsOfAnOperation) {
  CommsLog log({.enabled = true, .prof_all = false, .prof_ops = {"reduce", "all_gather"}});
  for (const char* operation : {"reduce", "reduce_scatter", "all_gather_into_tensor", "all_reduce"})
    log.hear(call(operation, 1'000'000, 4, milliseconds(1)));
  const auto entries = log.entries();
  ASSERT_EQ(entries.size(), 2);
  EXPECT_EQ(entries[0].operation, "all_gather_into_tensor");
  EXPECT_DOUBLE_EQ(entries[0].bus_gbps(), 6);
  EXPECT_EQ(entries[1].operation, "reduce");
}

TEST(CommsLog, TellsEachCallWhenAMethodOrAWaitHasEnded) {
  std::vector<std::string> lines;
  const LogSink former = set_log_sink([&](LogLevel, const std::string& line) { lines.push_back(line); });
  CommsLog log({.enabled = true, .verbose = true});
  log.hear(call("all_reduce", 2000, 4, milliseconds(2)));
  EXPECT_TRUE(lines.empty());
  log.hear({.kind = Notice::Kind::kWait});
  log.set_options({.enabled = true, .verbose = true, .debug = true});
  log.hear(call("all_reduce", 2000, 4, milliseconds(2)));
  log.hear({.kind = Notice::Kind::kCall});
  set_log_sink(former);
  ASSERT_EQ(lines.size(), 2);
  EXPECT_EQ(lines[0], "comm: all_reduce | 2.0 kB | 2.000 ms");
  EXPECT_EQ(lines[1], "comm: all_reduce | 2.0 kB | 2.000 ms | in backward | of layers.3 | group 'world', 4 ranks");
}

}  // namespace
}  // namespace trireme
