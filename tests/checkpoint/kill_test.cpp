// Saves whose process is killed with SIGKILL before, or in the middle of, every operation on files.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <memory>
#include <sstream>

#include "tests/base/faults.h"
#include "tests/checkpoint/fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/processes.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/async_save.h"
#include "trireme/checkpoint/checkpoint.h"

#include <ATen/ops/empty.h>

namespace trireme {
namespace {

using checkpoint_test::empty_state_of;
using checkpoint_test::Folder;
using checkpoint_test::has_seed;
using checkpoint_test::state_of;
using checkpoint_test::text_of;
using checkpoint_test::write_text;
using testing::KilledFiles;
using testing::named_error_of;

constexpr int kKillRanks = 2;

struct Scenario {
  const char* name;
  const char* tag;  ///< of the second save; the first is "one"
  int keep_last = 0;
  bool async = false;
};

constexpr Scenario kScenarios[] = {{.name = "NewTag", .tag = "two"},
                                   {.name = "SameTag", .tag = "one"},
                                   {.name = "KeepLast", .tag = "two", .keep_last = 1},
                                   {.name = "Async", .tag = "two", .async = true}};

std::vector<pid_t> pids_of(Group& world) {
  const auto own = at::empty({1}, at::kLong);
  const auto all = at::empty({world.size()}, at::kLong);
  own.data_ptr<int64_t>()[0] = ::getpid();
  world.all_gather(all, own).wait();
  const int64_t* first = all.data_ptr<int64_t>();
  return {first, first + world.size()};
}

/// "FOLDER SCENARIO RANK OPERATION ALL": saves seed 2; rank RANK dies at its operation OPERATION, with ALL = 1 together
/// with every other rank. OPERATION -1: nobody dies, and each rank leaves the number of its operations in a file.
int save_and_die(Group& world, const std::string& argument) {
  std::istringstream words(argument);
  std::string folder;
  int scenario = 0, rank = 0, operation = 0, all = 0;
  words >> folder >> scenario >> rank >> operation >> all;
  const Scenario& chosen = kScenarios[scenario];
  const auto pids = pids_of(world);
  auto victims = all ? pids : std::vector<pid_t>{::getpid()};
  std::rotate(victims.begin(), std::find(victims.begin(), victims.end(), ::getpid()) + 1,
              victims.end());  // itself last
  KilledFiles files(world.rank() == rank ? operation : -1, victims);
  const StateTree state = state_of(world.rank(), world.size(), 2);
  const SaveOptions options{.keep_last = chosen.keep_last, .files = &files};
  if (chosen.async) {
    AsyncSaver saver(world);
    (void)saver.save(folder, chosen.tag, state, options);
    (void)saver.wait();
  } else {
    (void)save_checkpoint(world, folder, chosen.tag, state, options);
  }
  if (operation < 0) std::ofstream(str(folder, "/operations", world.rank())) << files.operations();
  return 0;
}

std::string argument_of(const Folder& folder, int scenario, int rank, int operation, bool all) {
  return str(folder.path().string(), " ", scenario, " ", rank, " ", operation, " ", all ? 1 : 0);
}

void save_seed(const Folder& folder, const std::string& tag, int seed) {
  run_ranks(kKillRanks, [&](Rank& rank) {
    (void)save_checkpoint(rank.world(), folder.path(), tag, state_of(rank.id(), kKillRanks, seed));
  });
}

/// The seed of what `tag` holds on all ranks, 0 for a mixture; or the error.
std::string seed_in(const Folder& folder, const std::string& tag) {
  std::string found[kKillRanks];
  run_ranks(kKillRanks, [&](Rank& rank) {
    StateTree state = empty_state_of(rank.id(), kKillRanks);
    int seed = 0;
    const auto error = named_error_of([&] {
      const auto loaded = load_checkpoint(rank.world(), folder.path(), tag, state);
      for (const int candidate : {1, 2})
        if (has_seed(state, rank.id(), kKillRanks, candidate) && loaded->values == str(R"({"seed":)", candidate, "}"))
          seed = candidate;
    });
    found[rank.id()] = error == "nothing" ? std::to_string(seed) : error;
  });
  return found[0] == found[1] ? found[0] : str("ranks disagree: ", found[0], " / ", found[1]);
}

int operations_of(int scenario, int rank) {
  Folder folder;
  save_seed(folder, "one", 1);
  for (const auto& result :
       run_processes(kKillRanks, save_and_die, {.argument = argument_of(folder, scenario, 0, -1, false)}))
    EXPECT_EQ(result.exit_code, 0) << result.error_text;
  return std::stoi(text_of(folder / str("operations", rank)));
}

struct KillPoints {
  int killed = 0;
  std::map<std::string, int> left;  ///< seed of what the killed save left -> how often
};

/// Kills `rank` at each of its operations, alone or with everybody, and looks at what is left.
void kill_everywhere(int scenario, int rank, bool all, KillPoints& points) {
  const Scenario& chosen = kScenarios[scenario];
  const int operations = operations_of(scenario, rank);
  for (int at = 0; at < operations; ++at) {
    SCOPED_TRACE(str(chosen.name, ", rank ", rank, all ? " and all others" : " alone", ", operation ", at));
    Folder folder;
    save_seed(folder, "one", 1);
    const auto results =
        run_processes(kKillRanks, save_and_die, {.argument = argument_of(folder, scenario, rank, at, all)});
    ASSERT_EQ(results[rank].signal, SIGKILL);
    const ProcessResult& other = results[1 - rank];
    if (!all && other.exit_code != 0) {
      EXPECT_NE(other.error_text.find(str("rank ", rank)), std::string::npos) << other.error_text;
    }
    ++points.killed;

    const std::string left = seed_in(folder, "");
    ++points.left[left];
    EXPECT_TRUE(left == "1" || left == "2") << left;
    for (const auto& tag : complete_tags(folder.path())) {
      const std::string seed = seed_in(folder, tag);
      EXPECT_TRUE(seed == "1" || seed == "2") << tag << ": " << seed;
    }
    save_seed(folder, "three", 2);
    EXPECT_EQ(seed_in(folder, ""), "2");
    for (const auto& name : folder.names())
      EXPECT_FALSE(name.starts_with(".") || name.starts_with("latest.")) << name << " was not tidied up";
  }
}

class KilledProcess : public ::testing::TestWithParam<int> {};

TEST_P(KilledProcess, LeavesTheOldOrTheNewCheckpointWhereverTheKillComes) {
  const CapturedLog quiet;
  KillPoints points;
  for (const int rank : {0, 1})
    for (const bool all : {false, true}) kill_everywhere(GetParam(), rank, all, points);
  // Together more than 200.
  EXPECT_GE(points.killed, 55);
  EXPECT_GT(points.left["1"], 0);
  EXPECT_GT(points.left["2"], 0);
  RecordProperty("kill_points", points.killed);
  std::printf("%s: killed at %d points; the old checkpoint was left %d times, the new one %d times\n",
              kScenarios[GetParam()].name, points.killed, points.left["1"], points.left["2"]);
}

const auto kScenarioName = [](const auto& info) { return std::string(kScenarios[info.param].name); };
INSTANTIATE_TEST_SUITE_P(Save, KilledProcess, ::testing::Values(1), kScenarioName);  // what is replaced is in use
INSTANTIATE_TEST_SUITE_P(Slow, KilledProcess, ::testing::Values(0, 2, 3), kScenarioName);

}  // namespace
}  // namespace trireme
