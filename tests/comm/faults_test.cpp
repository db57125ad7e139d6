// A rank that dies, stops or throws in any collective: every survivor ends, names rank, operation and number, and
// leaves nothing behind.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <regex>
#include <set>
#include <stdexcept>

#include "tests/comm/collective_calls.h"
#include "tests/support/processes.h"
#include "trireme/base/log.h"
#include "trireme/comm/world.h"

namespace trireme {
namespace {

using namespace std::chrono_literals;

constexpr int kFaultyRank = 1;
constexpr int kFaultyCall = 12;

/// argument: "<collective> <fault>"
int fail_in_call_12(Group& world, const std::string& argument) {
  const std::string name = argument.substr(0, argument.find(' '));
  const std::string fault = argument.substr(argument.find(' ') + 1);
  for (int call = 1; call <= 20; ++call) {
    if (world.rank() == kFaultyRank && call == kFaultyCall - 2) {  // init() made two barriers
      if (fault == "dies") ::raise(SIGKILL);
      if (fault == "stops") ::raise(SIGSTOP);
      throw std::runtime_error("the tide is out");
    }
    collective(name).run(world, 1000);
  }
  return 0;
}

class InEveryCollective : public ::testing::TestWithParam<std::string> {
 protected:
  static void expect_named(const ProcessResult& result, const std::string& name) {
    EXPECT_EQ(result.exit_code, 1);
    EXPECT_NE(result.error_text.find("rank 1"), std::string::npos) << result.error_text;
    // Messages have numbers of their own, and ranks that exchange them with others may be some ahead or behind.
    const std::regex call(name == "recv" ? "(send|recv) #[0-9]+ " : name + " #12\\b");
    EXPECT_TRUE(std::regex_search(result.error_text, call)) << result.error_text;
    EXPECT_NE(result.error_text.find("group 'world'"), std::string::npos) << result.error_text;
  }
};

std::set<std::string> shared_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) names.insert(entry.path());
  return names;
}

TEST_P(InEveryCollective, ADeadRankIsNamedByEverySurvivor) {
  const auto before = shared_files();
  for (const int size : {2, 4}) {
    const auto results = run_processes(size, fail_in_call_12, {.argument = GetParam() + " dies"});
    for (int rank = 0; rank < size; ++rank) {
      const ProcessResult& result = results[static_cast<size_t>(rank)];
      if (rank == kFaultyRank) {
        EXPECT_EQ(result.signal, SIGKILL);
        continue;
      }
      expect_named(result, GetParam());
      EXPECT_NE(result.error_text.find("died"), std::string::npos) << result.error_text;
      EXPECT_LE(result.seconds - results[kFaultyRank].seconds, 5.0);
    }
  }
  EXPECT_EQ(shared_files(), before);
}

// Waits for the time to be up, which is three seconds in each.
class StoppedInEveryCollective : public InEveryCollective {};

TEST_P(StoppedInEveryCollective, IsNamedWhenTheTimeIsUp) {
  const auto results = run_processes(3, fail_in_call_12, {.comm_timeout = 3s, .argument = GetParam() + " stops"});
  for (const int rank : {0, 2}) {
    expect_named(results[static_cast<size_t>(rank)], GetParam());
    EXPECT_NE(results[static_cast<size_t>(rank)].error_text.find("did not arrive"), std::string::npos)
        << results[static_cast<size_t>(rank)].error_text;
  }
}

TEST_P(InEveryCollective, ARankThatThrowsTellsItsPeersWhy) {
  const auto results = run_processes(3, fail_in_call_12, {.argument = GetParam() + " throws"});
  EXPECT_EQ(results[1].error_text, "the tide is out\n");
  for (const int rank : {0, 2}) {
    expect_named(results[static_cast<size_t>(rank)], GetParam());
    EXPECT_NE(results[static_cast<size_t>(rank)].error_text.find("the tide is out"), std::string::npos)
        << results[static_cast<size_t>(rank)].error_text;
    EXPECT_LE(results[static_cast<size_t>(rank)].seconds - results[kFaultyRank].seconds, 5.0);
  }
}

const auto kCollective = [](const auto& info) { return info.param; };
INSTANTIATE_TEST_SUITE_P(Faults, InEveryCollective,
                         ::testing::Values("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all",
                                           "gather", "scatter", "barrier", "recv"),
                         kCollective);
INSTANTIATE_TEST_SUITE_P(Faults, StoppedInEveryCollective, ::testing::Values("all_reduce", "recv"), kCollective);
INSTANTIATE_TEST_SUITE_P(Slow, StoppedInEveryCollective,
                         ::testing::Values("reduce_scatter", "all_gather", "broadcast", "all_to_all", "gather",
                                           "scatter", "barrier"),
                         kCollective);

TEST(KilledFromOutside, InTheMiddleOfALongCallIsNamed) {
  const auto results = run_processes(2,
                                     [](Group& world, const std::string&) {
                                       at::Tensor tensor = at::ones({4 << 20});
                                       while (true) world.all_reduce(tensor, ReduceOp::kMax).wait();
                                       return 0;
                                     },
                                     {.signal = SIGKILL, .signalled_rank = 1, .signal_after = 500ms});
  EXPECT_EQ(results[1].signal, SIGKILL);
  EXPECT_EQ(results[0].exit_code, 1);
  EXPECT_NE(results[0].error_text.find("rank 1 (pid "), std::string::npos) << results[0].error_text;
  EXPECT_NE(results[0].error_text.find("all_reduce #"), std::string::npos) << results[0].error_text;
  EXPECT_LE(results[0].seconds - results[1].seconds, 1.0);
}

TEST(KilledFromOutside, WhileAPeerWaitsForSharedMemoryIsNamed) {
  const auto results = run_processes(
      2,
      [](Group& world, const std::string&) {
        if (world.rank() == 1) ::pause();
        world.memory_sharing()->wait_until(
            [] { return false; },
            {.peer = 1, .operation = "reduce of gradients", .seq = 7, .detail = [] { return "wte.weight"; }});
        return 0;
      },
      {.signal = SIGKILL, .signalled_rank = 1, .signal_after = 500ms});
  EXPECT_EQ(results[0].exit_code, 1);
  EXPECT_NE(results[0].error_text.find("died while rank 0 waited for it in reduce of gradients #7 (wte.weight)"),
            std::string::npos)
      << results[0].error_text;
}

TEST(AWorldOfProcesses, SharesMemoryAndAgreesOnSums) {
  const auto results = run_processes(4, [](Group& world, const std::string&) {
    at::Tensor tensor = at::full({300007}, world.rank() + 1.0);
    world.all_reduce(tensor).wait();
    const auto memory = world.memory_sharing()->share(4096, MemorySharing::Share::kEach);
    memory->of(world.rank())[0] = std::byte(world.rank());
    world.barrier();
    int wrong = at::equal(tensor, at::full({300007}, 10.0)) ? 0 : 2;
    for (int rank = 0; rank < world.size(); ++rank) wrong += memory->of(rank)[0] == std::byte(rank) ? 0 : 4;
    return wrong;
  });
  for (const ProcessResult& result : results) {
    EXPECT_EQ(result.exit_code, 0) << result.error_text;
    EXPECT_EQ(result.error_text, "");
  }
}

TEST(StoppedRank, IsNamedInOneWarningWhileItsPeersWait) {
  const auto results = run_processes(2, [](Group&, const std::string&) {
    set_log_sink([](LogLevel, const std::string& message) { std::fprintf(stderr, "%s\n", message.c_str()); });
    ::setenv("TRIREME_WARN_AFTER_S", "0.2", 1);
    ::setenv("TRIREME_TIMEOUT_S", "2.5", 1);
    const World world = init();
    if (world.rank == 1) ::raise(SIGSTOP);
    world.group->barrier();
    return 0;
  });
  const std::regex warning(
      "comm: rank 1 \\(pid ([0-9]+)\\) is stopped, by SIGSTOP or a debugger, and rank 0 waits in "
      "barrier #[0-9]+ of group 'world' after 0\\.[0-9] s; rank 1 was last in [^\n]*`kill -CONT "
      "\\1` lets it go on");
  const std::string& text = results[0].error_text;
  EXPECT_EQ(std::distance(std::sregex_iterator(text.begin(), text.end(), warning), std::sregex_iterator()), 1) << text;
  EXPECT_NE(text.find("is stopped and did not arrive"), std::string::npos) << text;
}

}  // namespace
}  // namespace trireme
