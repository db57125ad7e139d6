// How ranks find each other: the variables of launchers, and joining for real.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "comm/meeting/launch_variables.h"
#include "tests/support/processes.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/world.h"

namespace trireme {
namespace {

using comm::LaunchVariables;
using comm::Meeting;
using Variables = std::map<std::string, std::string>;

comm::Environment environment(const Variables& variables) {
  return [variables](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional(found->second);
  };
}

LaunchVariables read(const Variables& variables) { return comm::read_launch_variables(environment(variables)); }

std::string error_of(const Variables& variables) {
  try {
    read(variables);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(LaunchVariables, NoneMakeAWorldOfOne) {
  const LaunchVariables found = read({});
  EXPECT_EQ(found.size, 1);
  EXPECT_EQ(found.meeting, Meeting::kAlone);
}

TEST(LaunchVariables, OfTorchrunNameItsServer) {
  const LaunchVariables found = read({{"RANK", "3"},
                                      {"WORLD_SIZE", "4"},
                                      {"LOCAL_RANK", "1"},
                                      {"LOCAL_WORLD_SIZE", "2"},
                                      {"MASTER_ADDR", "node7"},
                                      {"MASTER_PORT", "1234"},
                                      {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                      {"TORCHELASTIC_RESTART_COUNT", "2"}});
  EXPECT_EQ(found.rank, 3);
  EXPECT_EQ(found.size, 4);
  EXPECT_EQ(found.local_rank, 1);
  EXPECT_EQ(found.local_size, 2);
  EXPECT_EQ(found.meeting, Meeting::kAddress);
  EXPECT_EQ(found.host, "node7");
  EXPECT_EQ(found.port, 1234);
  EXPECT_TRUE(found.launcher_serves);
  EXPECT_EQ(found.attempt, "2");
}

TEST(LaunchVariables, OfOpenMpiMeetInTheFolderOfTheJob) {
  const LaunchVariables found = read({{"OMPI_COMM_WORLD_RANK", "1"},
                                      {"OMPI_COMM_WORLD_SIZE", "2"},
                                      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                                      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                                      {"PMIX_NAMESPACE", "77"},
                                      {"PMIX_SERVER_TMPDIR", "/tmp/job"}});
  EXPECT_EQ(found.rank, 1);
  EXPECT_EQ(found.meeting, Meeting::kFile);
  EXPECT_EQ(found.path.rfind("/tmp/job/trireme-", 0), 0u) << found.path;
}

TEST(LaunchVariables, OfOpenMpiOnSeveralHostsAreRefused) {
  const Variables variables{{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "4"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                            {"PMIX_NAMESPACE", "77"}};
  EXPECT_NE(error_of(variables).find("init() joins ranks of one host"), std::string::npos);
}

TEST(LaunchVariables, OfSlurmCountOnlyWithinAStep) {
  const Variables batch{{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "4"}, {"SLURM_LOCALID", "0"}, {"SLURM_JOB_ID", "9"}};
  EXPECT_EQ(read(batch).size, 1);
  Variables step = batch;
  step["SLURM_STEP_ID"] = "0";
  EXPECT_EQ(read(step).size, 4);
  EXPECT_EQ(read(step).meeting, Meeting::kAddress);
  step["SLURM_STEP_NUM_NODES"] = "2";
  step["SLURM_STEP_NODELIST"] = "oar[1-2]";
  EXPECT_NE(error_of(step).find("4 ranks on 2 nodes (oar[1-2]): init() joins ranks of one host"), std::string::npos)
      << error_of(step);
  step["MASTER_ADDR"] = "oar1";  // where they meet, they are told their hosts
  EXPECT_EQ(read(step).local_size, 4);
}

TEST(LaunchVariables, TakeDeepspeedsNameOfTheLocalSize) {
  Variables variables{{"RANK", "0"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "a"}, {"LOCAL_SIZE", "2"}};
  EXPECT_EQ(read(variables).local_size, 2);
  variables["LOCAL_WORLD_SIZE"] = "4";
  EXPECT_EQ(read(variables).local_size, 4);
}

TEST(LaunchVariables, ThatSayThatAllRanksAreHereLetThemMeetAtLoopback) {
  Variables variables{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node7"}, {"LOCAL_WORLD_SIZE", "2"}};
  EXPECT_EQ(read(variables).meeting_host(), "127.0.0.1");
  variables["MASTER_ADDR"] = "::1";
  EXPECT_EQ(read(variables).meeting_host(), "::1");
  variables["MASTER_ADDR"] = "node7";
  variables["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(read(variables).meeting_host(), "node7");
  variables.erase("TORCHELASTIC_USE_AGENT_STORE");
  variables["LOCAL_WORLD_SIZE"] = "1";
  EXPECT_EQ(read(variables).meeting_host(), "node7");
  variables.erase("LOCAL_WORLD_SIZE");  // nobody says so
  EXPECT_EQ(read(variables).meeting_host(), "node7");
}

TEST(LaunchVariables, HaveTheTokenOfTheJob) {
  Variables variables{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node7"}};
  EXPECT_EQ(read(variables).token, "");
  variables["TRIREME_TOKEN"] = "secret";
  EXPECT_EQ(read(variables).token, "secret");
  variables["TRIREME_TOKEN"] = "";
  EXPECT_NE(error_of(variables).find("TRIREME_TOKEN is set, and empty"), std::string::npos);
}

TEST(LaunchVariables, ThatAShellHasLeftAreNamedWithACommandThatDropsThem) {
  const std::string advice =
      ". This process's environment says so: RANK=1, WORLD_SIZE=2. If no launcher has set that, it is left over in the "
      "shell: run the program alone by `env -u RANK -u WORLD_SIZE PROGRAM`, or unset them";
  EXPECT_TRUE(error_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}}).ends_with(advice));
  EXPECT_NE(error_of({{"RANK", "1"}}).find("`env -u RANK PROGRAM`"), std::string::npos);
  EXPECT_EQ(read({}).advice, "");
}

TEST(LaunchVariables, ThatAreMissingOrWrongAreNamed) {
  EXPECT_NE(error_of({{"RANK", "0"}}).find("WORLD_SIZE is not set"), std::string::npos);
  EXPECT_NE(error_of({{"RANK", "two"}, {"WORLD_SIZE", "2"}}).find("RANK=two"), std::string::npos);
  EXPECT_NE(error_of({{"RANK", "2"}, {"WORLD_SIZE", "2"}}).find("RANK=2: expected less than WORLD_SIZE=2"),
            std::string::npos);
  EXPECT_NE(error_of({{"RANK", "1"}, {"WORLD_SIZE", "2"}}).find("MASTER_ADDR"), std::string::npos);
}

TEST(Timeout, IsReadInSecondsFromTheEnvironment) {
  using namespace std::chrono_literals;
  EXPECT_EQ(comm::read_limits(environment({}), 5s).timeout, 5s);
  EXPECT_EQ(comm::read_limits(environment({{"TRIREME_TIMEOUT_S", "2.5"}}), 5s).timeout, 2500ms);
  EXPECT_THROW(comm::read_limits(environment({{"TRIREME_TIMEOUT_S", "soon"}}), 5s), ConfigError);
}

TEST(Timeout, OfANameAndOfAStoppedRankHasAVariableOfItsOwn) {
  using namespace std::chrono_literals;
  EXPECT_EQ(comm::read_limits(environment({}), 5s).resolve, 60s);
  EXPECT_EQ(comm::read_limits(environment({{"TRIREME_RESOLVE_TIMEOUT_S", "300"}}), 5s).resolve, 300s);
  EXPECT_EQ(comm::read_limits(environment({}), 5s).warn_after, 60s);
  EXPECT_EQ(comm::read_limits(environment({{"TRIREME_WARN_AFTER_S", "0.5"}}), 5s).warn_after, 500ms);
  EXPECT_THROW(comm::read_limits(environment({{"TRIREME_WARN_AFTER_S", "-1"}}), 5s), ConfigError);
}

TEST(Transport, IsReadFromTheEnvironmentAndRefusedByName) {
  EXPECT_EQ(comm::read_transport(environment({}), Transport::kC10d), Transport::kC10d);
  EXPECT_EQ(comm::read_transport(environment({{"TRIREME_COMM", "auto"}}), Transport::kC10d), Transport::kAuto);
  EXPECT_EQ(comm::read_transport(environment({{"TRIREME_COMM", "shm"}}), Transport::kAuto), Transport::kShm);
  EXPECT_EQ(comm::read_transport(environment({{"TRIREME_COMM", "c10d"}}), Transport::kAuto), Transport::kC10d);
  EXPECT_THROW(comm::read_transport(environment({{"TRIREME_COMM", "smoke"}}), Transport::kAuto), ConfigError);
}

/// 0 when the ranks of `world` see each other.
int sum_is_right(const World& world) {
  at::Tensor tensor = at::full({100}, world.rank + 1.0);
  world.group->all_reduce(tensor).wait();
  return tensor[0].item<int>() == world.size * (world.size + 1) / 2 ? 0 : 3;
}

TEST(Init, CanBeCalledAgain) {
  const auto results = run_processes(3, [](Group&, const std::string&) {
    const World second = init();
    const World third = init();
    return sum_is_right(second) + sum_is_right(third);
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.error_text;
}

TEST(Init, UsesTheServerOfTorchrunsAgent) {
  c10d::TCPStoreOptions options;
  options.port = 0;
  options.isServer = true;
  options.waitWorkers = false;
  const c10d::TCPStore agent("127.0.0.1", options);
  const auto join = [](Group&, const std::string& port) {
    ::setenv("MASTER_PORT", port.c_str(), 1);
    ::setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    return sum_is_right(init()) + sum_is_right(init());
  };
  for (const auto& result : run_processes(2, join, {.argument = std::to_string(agent.getPort())}))
    EXPECT_EQ(result.exit_code, 0) << result.error_text;
}

TEST(Init, NamesARankThatDoesNotCome) {
  const auto results = run_processes(2, [](Group& world, const std::string&) {
    if (world.rank() == 1) return 0;
    ::setenv("TRIREME_TIMEOUT_S", "1", 1);
    (void)init();
    return 0;
  });
  EXPECT_EQ(results[0].exit_code, 1);
  EXPECT_NE(results[0].error_text.find("for rank 1 of 2, which did not come"), std::string::npos)
      << results[0].error_text;
}

/// The exit code of a forked process in which Fork's rank runs `body`; 0: the child ended by itself, with code 0.
int in_forked_child(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::alarm(10);
    body();
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(pid, &status, 0);
  return status;
}

TEST(Fork, LeavesTheRankOfItsParentInTheJob) {
  const auto results = run_processes(2, [](Group&, const std::string&) {
    World world = init();
    const auto shared = at::ones({10});
    auto pending = world.group->all_reduce(shared);
    while (!pending.done()) ::usleep(1000);  // from here on the group has a thread, which a fork does not copy
    pending.wait();
    const int child = in_forked_child([&world] { world.group.reset(); });
    return child + sum_is_right(world);
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.error_text;
}

TEST(Fork, CannotCallForItsParent) {
  const auto results = run_processes(2, [](Group& world, const std::string&) {
    const int child = in_forked_child([&world] {
      try {
        world.barrier();
        ::_exit(1);
      } catch (const StateError& error) {
        if (std::string(error.what()).find("was forked from rank") == std::string::npos) ::_exit(2);
      }
      world.abort("the child gives up");
    });
    world.barrier();
    return child;
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.error_text;
}

TEST(SlowInit, SaysAfterTenSecondsForWhomItWaitsAndGoesOn) {
  const auto results = run_processes(2, [](Group& world, const std::string&) {
    set_log_sink([](LogLevel, const std::string& message) { std::fprintf(stderr, "%s\n", message.c_str()); });
    if (world.rank() == 1) ::usleep(11'500'000);
    return sum_is_right(init());
  });
  for (const auto& result : results) EXPECT_EQ(result.exit_code, 0) << result.error_text;
  EXPECT_NE(results[0].error_text.find("rank 0 of 2 has waited 10 s at 127.0.0.1:"), std::string::npos)
      << results[0].error_text;
  EXPECT_NE(results[0].error_text.find(" for rank 1, and goes on waiting, 1800 s in all. This process's environment"),
            std::string::npos)
      << results[0].error_text;
  EXPECT_EQ(results[1].error_text, "");
}

// The body of the next test, run by mpirun in processes of its own.
TEST(DISABLED_UnderMpirun, EveryRankJoins) { EXPECT_EQ(sum_is_right(init()), 0); }

TEST(Init, JoinsUnderMpirunWithoutAnAddress) {
  if (std::system("command -v mpirun > /dev/null 2>&1") != 0) GTEST_SKIP() << "mpirun is not installed";
  char self[4096] = "";
  ASSERT_GT(::readlink("/proc/self/exe", self, sizeof(self) - 1), 0);
  const std::string command =
      std::string(
          "env -u RANK -u WORLD_SIZE -u MASTER_ADDR -u MASTER_PORT timeout 60 mpirun --allow-run-as-root "
          "--oversubscribe -n 3 ") +
      self + " --gtest_also_run_disabled_tests --gtest_filter=DISABLED_UnderMpirun.* > /dev/null 2>&1";
  EXPECT_EQ(WEXITSTATUS(std::system(command.c_str())), 0) << command;
}

}  // namespace
}  // namespace trireme
