#include "trireme/observe/timeline.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "tests/observe/fixture.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"

namespace trireme {
namespace {

using observe_test::Folder;
using observe_test::text_of;
using std::chrono::milliseconds;

Notice window(int64_t step) {
  const auto now = Notice::Clock::now();
  return {.kind = Notice::Kind::kWindow, .name = "step", .number = step, .rank = 0, .begin = now, .end = now};
}

Notice of_group(std::string_view operation, Notice::Clock::time_point begin, milliseconds took) {
  return {.kind = Notice::Kind::kCollective,
          .name = operation,
          .subject = "layers.\"3\"",
          .caller = "forward",
          .group = "world/data",
          .group_size = 2,
          .bytes = 4096,
          .number = 5,
          .begin = begin,
          .end = begin + took};
}

/// The complete events of a joined trace, by name.
std::multimap<std::string, Json> events_of(const std::filesystem::path& path) {
  const Json trace = Json::parse(text_of(path));
  std::multimap<std::string, Json> events;
  for (const Json& event : trace.at("traceEvents"))
    if (event.at("ph") == "X") events.emplace(event.at("name").get<std::string>(), event);
  return events;
}

TEST(Timeline, RecordsTheStepsThatAreAskedFor) {
  Folder folder;
  {
    Timeline timeline(0, {.enabled = true, .output_path = (folder / "t").string(), .start_step = 2, .steps = 2});
    for (int step = 1; step <= 4; ++step) {
      const std::string name = str("forward of ", step);
      const auto begin = Notice::Clock::now();
      timeline.hear({.kind = Notice::Kind::kCall, .name = name, .begin = begin, .end = begin + milliseconds(1)});
      timeline.hear(window(step));
      timeline.hear({.kind = Notice::Kind::kCall, .name = str("end of ", step), .begin = begin, .end = begin});
    }
    EXPECT_EQ(timeline.recorded_steps(), 2);
  }
  EXPECT_TRUE(Json::parse(text_of(folder / "t" / "rank-0.json")).is_array());
  EXPECT_EQ(join_timelines(folder / "t", folder / "all.json"), std::vector<int>{0});
  const auto events = events_of(folder / "all.json");
  std::set<std::string> names;
  for (const auto& [name, event] : events) names.insert(name);
  EXPECT_EQ(names, (std::set<std::string>{"end of 2", "end of 3", "forward of 2", "forward of 3", "step 2", "step 3"}));
  EXPECT_NEAR(events.find("forward of 2")->second.at("dur").get<double>(), 1000, 1e-6);
}

TEST(Timeline, PutsCallsOfAGroupThatOverlapOnTracksBesideEachOther) {
  Folder folder;
  {
    Timeline timeline(0, {.enabled = true, .output_path = (folder / "t").string(), .start_step = 1, .steps = 0});
    const auto begin = Notice::Clock::now();
    timeline.hear(of_group("all_gather", begin, milliseconds(4)));
    timeline.hear(of_group("reduce_scatter", begin + milliseconds(2), milliseconds(4)));  // overlaps the first
    timeline.hear(of_group("broadcast", begin + milliseconds(5), milliseconds(4)));       // the second alone
  }
  join_timelines(folder / "t", folder / "all.json");
  const auto events = events_of(folder / "all.json");
  const Json& first = events.find("all_gather layers.\"3\"")->second;
  const Json& second = events.find("reduce_scatter layers.\"3\"")->second;
  const Json& third = events.find("broadcast layers.\"3\"")->second;
  EXPECT_NE(first.at("tid"), second.at("tid"));
  EXPECT_EQ(first.at("tid"), third.at("tid"));
  EXPECT_EQ(first.at("args").at("bytes"), 4096);
  EXPECT_EQ(first.at("args").at("group"), "world/data");
  EXPECT_EQ(first.at("args").at("in"), "forward");
}

TEST(Timeline, HasOperatorsThatNoOtherOneCalled) {
  Folder folder;
  {
    const auto timeline = std::make_shared<Timeline>(
        0, TimelineOptions{.enabled = true, .output_path = (folder / "t").string(), .start_step = 1, .steps = 1});
    const Listening listening(0, timeline);
    at::mm(at::ones({2, 3}), at::ones({3, 2}));
    at::ones({2, 2}).requires_grad_().tanh().sum().backward();
    tell(window(1));
    at::mm(at::ones({2, 3}), at::ones({3, 2}));  // afterwards
  }
  join_timelines(folder / "t", folder / "all.json");
  const auto events = events_of(folder / "all.json");
  EXPECT_EQ(events.count("aten::mm"), 1);
  EXPECT_EQ(events.count("aten::ones"), 3);
  EXPECT_EQ(events.count("aten::fill_"), 0);  // ones() calls it
  EXPECT_EQ(events.count("TanhBackward0"), 1);
  EXPECT_EQ(events.count("aten::tanh_backward"), 0);  // the node calls it
  for (const auto& [name, event] : events) EXPECT_FALSE(name.starts_with("autograd::")) << name;
}

TEST(Timeline, OfSeveralRanksHasOneClock) {
  Folder folder;
  const auto options = TimelineOptions{.enabled = true, .output_path = (folder / "t").string(), .start_step = 1};
  {
    Timeline first(0, options);
    std::this_thread::sleep_for(milliseconds(50));
    Timeline second(1, options);
    const auto begin = Notice::Clock::now();
    const Notice both{.kind = Notice::Kind::kCall, .name = "forward", .begin = begin, .end = begin + milliseconds(1)};
    first.hear(both);
    second.hear(both);
  }
  EXPECT_EQ(join_timelines(folder / "t", folder / "all.json"), (std::vector<int>{0, 1}));
  const auto events = events_of(folder / "all.json");
  std::map<int, double> begins;
  for (const auto& [name, event] : events) begins[event.at("pid").get<int>()] = event.at("ts").get<double>();
  ASSERT_EQ(begins.size(), 2);
  constexpr double kMicroseconds = 5000;  // of 50,000 between the two beginnings
  EXPECT_NEAR(begins[0], begins[1], kMicroseconds);
}

TEST(Timeline, ThatATornLineEndsIsRead) {
  Folder folder;
  {
    Timeline timeline(0, {.enabled = true, .output_path = (folder / "t").string(), .start_step = 1});
    timeline.hear(of_group("all_gather", Notice::Clock::now(), milliseconds(4)));
  }
  const std::string text = text_of(folder / "t" / "rank-0.json");
  write_file_atomically(posix_file_system(), folder / "t" / "rank-0.json", text + ",\n{\"name\":\"torn");
  join_timelines(folder / "t", folder / "all.json");
  EXPECT_EQ(events_of(folder / "all.json").size(), 1);
}

TEST(Timeline, RefusesWhatIsNoFileOfItsRankAndAnOutputThatItWouldDestroy) {
  Folder folder;
  { Timeline timeline(0, {.enabled = true, .output_path = (folder / "t").string(), .start_step = 1}); }
  const auto refusal = [&](const std::filesystem::path& output) -> std::string {
    try {
      join_timelines(folder / "t", output);
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  const auto expect = [&](const std::string& file, const std::string& text, const std::string& why) {
    write_file_atomically(posix_file_system(), folder / "t" / file, text);
    const std::string told = refusal(folder / "all.json");
    EXPECT_NE(told.find(file), std::string::npos) << told;
    EXPECT_NE(told.find(why), std::string::npos) << told;
    std::filesystem::remove(folder / "t" / file);
  };
  expect("rank-1.json", "", "no timeline in it");
  expect("rank-1.json", "[\n{\"a\":1}\n", "no event of a timeline");
  expect("rank-1.json", text_of(folder / "t" / "rank-0.json"), "events of rank 0 in the file of rank 1");
  EXPECT_NE(refusal(folder / "t" / "rank-0.json").find("the file of a rank"), std::string::npos);
  std::filesystem::create_directory(folder / "device");
  EXPECT_NE(refusal(folder / "device").find("something else than a file"), std::string::npos);
  EXPECT_EQ(refusal(folder / "all.json"), "");
}

TEST(Timeline, SaysWhereThereIsNone) {
  Folder folder;
  try {
    join_timelines(folder.path(), folder / "all.json");
    FAIL() << "joined nothing";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("no timeline there"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace trireme
