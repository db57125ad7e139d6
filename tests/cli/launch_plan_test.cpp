#include "cli/launch/launch_plan.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "cli/launch/launch_machine.h"
#include "tests/cli/error_text.h"

namespace trireme::cli {
namespace {

const LaunchMachine kMachine{.host_name = "node7.cluster", .cores = 8, .free_port = 4242};

std::map<std::string, std::string> environment_of(const RankCommand& command) {
  return {command.environment.begin(), command.environment.end()};
}

TEST(LaunchPlan, GivesEveryRankTorchrunsVariables) {
  const auto commands = plan_launch({.ranks_per_node = 3, .program = {"./prog", "--epochs", "3"}}, kMachine);
  ASSERT_EQ(commands.size(), 3u);
  EXPECT_EQ(commands[2].argv, (std::vector<std::string>{"./prog", "--epochs", "3"}));
  EXPECT_EQ(environment_of(commands[2]), (std::map<std::string, std::string>{{"RANK", "2"},
                                                                             {"LOCAL_RANK", "2"},
                                                                             {"WORLD_SIZE", "3"},
                                                                             {"LOCAL_WORLD_SIZE", "3"},
                                                                             {"LOCAL_SIZE", "3"},
                                                                             {"GROUP_RANK", "0"},
                                                                             {"MASTER_ADDR", "127.0.0.1"},
                                                                             {"MASTER_PORT", "4242"},
                                                                             {"OMP_NUM_THREADS", "2"}}));
}

TEST(LaunchPlan, GivesAllRanksTheOneSecretOfTheJob) {
  LaunchMachine machine = kMachine;
  machine.token = "secret";
  for (const auto& command : plan_launch({.ranks_per_node = 2, .program = {"./prog"}}, machine))
    EXPECT_EQ(environment_of(command).at("TRIREME_TOKEN"), "secret");
}

TEST(LaunchMachine, DrawsASecretForEachJobUnlessTheEnvironmentHasOne) {
  ::unsetenv("TRIREME_TOKEN");
  EXPECT_EQ(this_machine().token.size(), 32u);
  EXPECT_NE(this_machine().token, this_machine().token);
  ::setenv("TRIREME_TOKEN", "the user's", 1);
  EXPECT_EQ(this_machine().token, "");
  ::unsetenv("TRIREME_TOKEN");
}

TEST(LaunchPlan, StartsOneRankWithoutFlags) { EXPECT_EQ(plan_launch({.program = {"./prog"}}, kMachine).size(), 1u); }

TEST(LaunchPlan, GivesEveryRankAtLeastOneThreadAndKeepsAnExplicitNumber) {
  const auto many = plan_launch({.ranks_per_node = 100, .program = {"./prog"}}, kMachine);
  EXPECT_EQ(environment_of(many[0]).at("OMP_NUM_THREADS"), "1");
  auto machine = kMachine;
  machine.has_omp_num_threads = true;
  EXPECT_EQ(environment_of(plan_launch({.program = {"./prog"}}, machine)[0]).count("OMP_NUM_THREADS"), 0u);
}

TEST(LaunchPlan, TakesMasterAddressAndPortFromTheFlags) {
  const auto environment = environment_of(
      plan_launch({.master_addr = "10.0.0.7", .master_port = 29500, .program = {"./prog"}}, kMachine)[0]);
  EXPECT_EQ(environment.at("MASTER_ADDR"), "10.0.0.7");
  EXPECT_EQ(environment.at("MASTER_PORT"), "29500");
}

TEST(LaunchPlan, PassesTheLocalRankAsTheFirstArgumentWhereDeepspeedWould) {
  using Words = std::vector<std::string>;
  const auto script = plan_launch(
      {.ranks_per_node = 2, .names_of = "deepspeed", .passes_local_rank = true, .program = {"train.py", "-x"}},
      kMachine);
  EXPECT_EQ(script[1].argv, (Words{"python3", "-u", "-m", "trireme.as_deepspeed", "train.py", "--local_rank=1", "-x"}));
  const auto module = plan_launch({.kind = ProgramKind::kModule,
                                   .names_of = "deepspeed",
                                   .passes_local_rank = true,
                                   .program = {"pkg.train", "-x"}},
                                  kMachine);
  EXPECT_EQ(module[0].argv,
            (Words{"python3", "-u", "-m", "trireme.as_deepspeed", "-m", "pkg.train", "--local_rank=0", "-x"}));
  EXPECT_NE(error_text([] { (void)plan_launch({.passes_local_rank = true}, kMachine); }).find("no program given"),
            std::string::npos);
}

TEST(LaunchPlan, RunsScriptsAndModulesUnderPythonWithUnbufferedOutput) {
  using Words = std::vector<std::string>;
  EXPECT_EQ(plan_launch({.program = {"train.py", "-x"}}, kMachine)[0].argv, (Words{"python3", "-u", "train.py", "-x"}));
  EXPECT_EQ(plan_launch({.kind = ProgramKind::kProgram, .program = {"train.py"}}, kMachine)[0].argv, Words{"train.py"});
  EXPECT_EQ(plan_launch({.kind = ProgramKind::kModule, .program = {"pkg.train"}}, kMachine)[0].argv,
            (Words{"python3", "-u", "-m", "pkg.train"}));
  LaunchMachine machine = kMachine;
  machine.python = "/env/bin/python";
  EXPECT_EQ(plan_launch({.program = {"train.py"}}, machine)[0].argv, (Words{"/env/bin/python", "-u", "train.py"}));
}

TEST(LaunchPlan, LetsAProgramsDeepspeedMeanTriremeWithThePythonThatItNames) {
  using Words = std::vector<std::string>;
  const auto argv = [](ProgramKind kind, const Words& program) {
    LaunchMachine machine = kMachine;
    machine.python = "/opt/python";
    return plan_launch({.kind = kind, .names_of = "deepspeed", .program = program}, machine)[0].argv;
  };
  EXPECT_EQ(argv(ProgramKind::kDetect, {"train.py", "-x"}),
            (Words{"/opt/python", "-u", "-m", "trireme.as_deepspeed", "train.py", "-x"}));
  EXPECT_EQ(argv(ProgramKind::kModule, {"pkg.train"}),
            (Words{"/opt/python", "-u", "-m", "trireme.as_deepspeed", "-m", "pkg.train"}));
  EXPECT_EQ(argv(ProgramKind::kDetect, {"/env/bin/python3.11", "-B", "train.py"}),
            (Words{"/env/bin/python3.11", "-B", "-m", "trireme.as_deepspeed", "train.py"}));
  EXPECT_EQ(argv(ProgramKind::kDetect, {"python", "-m", "pkg.train"}),
            (Words{"python", "-m", "trireme.as_deepspeed", "-m", "pkg.train"}));
  EXPECT_EQ(argv(ProgramKind::kDetect, {"python", "-X", "dev", "-W", "ignore", "train.py"}),
            (Words{"python", "-X", "dev", "-W", "ignore", "-m", "trireme.as_deepspeed", "train.py"}));
  const auto fsdp = plan_launch({.names_of = "fsdp", .program = {"train.py", "-x"}}, kMachine)[0].argv;
  EXPECT_EQ(fsdp, (Words{"python3", "-u", "-m", "trireme.as_fsdp", "train.py", "-x"}));
  EXPECT_THROW(argv(ProgramKind::kDetect, {"python3", "-c", "import deepspeed"}), ConfigError);
  EXPECT_THROW(argv(ProgramKind::kDetect, {"python3"}), ConfigError);
}

TEST(LaunchPlan, RunsOnTheSlotsOfAHostfileThatNamesThisMachine) {
  const std::vector<HostSlots> hosts = {{"node7", {0, 1, 2, 3}}, {"other", {0}}};
  const auto chosen = plan_launch({.hosts = hosts, .include = "node7:1,3", .program = {"./prog"}}, kMachine);
  ASSERT_EQ(chosen.size(), 2u);
  EXPECT_EQ(environment_of(chosen[1]).at("CUDA_VISIBLE_DEVICES"), "1,3");
  EXPECT_EQ(plan_launch({.nodes = 1, .hosts = hosts, .program = {"./prog"}}, kMachine).size(), 4u);
  EXPECT_EQ(plan_launch({.ranks_per_node = 2, .nodes = 1, .hosts = hosts, .program = {"./prog"}}, kMachine).size(), 2u);
}

TEST(LaunchPlan, IncludesSlotsOfLocalhostWithoutAHostfile) {
  EXPECT_EQ(plan_launch({.include = "localhost:0,5", .program = {"./prog"}}, kMachine).size(), 2u);
}

TEST(LaunchPlan, RefusesOtherHostsByName) {
  const LaunchRequest request{.hosts = {{"node7", {0}}, {"node8", {0}}}, .program = {"./prog"}};
  EXPECT_EQ(error_text([&] { plan_launch(request, kMachine); }),
            str("host 'node8' is not this machine ('node7.cluster'); keep to this one with --include node7: ",
                kSeveralHosts));
  // The advice works.
  auto heeded = request;
  heeded.include = "node7";
  EXPECT_EQ(plan_launch(heeded, kMachine).size(), 1u);
  const LaunchRequest elsewhere{.hosts = {{"worker-0", {0}}, {"worker-1", {0}}}, .program = {"./prog"}};
  EXPECT_EQ(error_text([&] { plan_launch(elsewhere, kMachine); }),
            str("host 'worker-0' is not this machine ('node7.cluster'); leave the host file out, or write `localhost "
                "slots=N` into it: ",
                kSeveralHosts));
  const LaunchRequest two_nodes{.nodes = 2, .program = {"./prog"}};
  EXPECT_EQ(error_text([&] { plan_launch(two_nodes, kMachine); }),
            str("--num_nodes 2: only 1 host is known; leave the flag out: ", kSeveralHosts));
}

TEST(LaunchPlan, RefusesFlagsThatDoNotFit) {
  const auto refusal = [](const LaunchRequest& request) { return error_text([&] { plan_launch(request, kMachine); }); };
  EXPECT_EQ(refusal({}), "no program given; write it after the flags, such as --num_gpus 2 ./my_program --epochs 3");
  EXPECT_EQ(
      refusal({.ranks_per_node = 2, .include = "localhost", .program = {"p"}}),
      "--num_gpus and --num_nodes cannot be combined with --include or --exclude; the slots say how many ranks run");
  EXPECT_EQ(refusal({.ranks_per_node = 3, .hosts = {{"localhost", {0, 1}}}, .program = {"p"}}),
            "--num_gpus 3: host 'localhost' has 2 slots in the host file");
  EXPECT_EQ(refusal({.ranks_per_node = 0, .program = {"p"}}), "--num_gpus 0: at least one rank is needed");
  EXPECT_EQ(refusal({.master_port = 70000, .program = {"p"}}),
            "--master_port 70000: a port is a number from 1 to 65535");
}

}  // namespace
}  // namespace trireme::cli
