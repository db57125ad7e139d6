// The supervisor with real child processes.
#include "cli/launch/supervisor.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <thread>

#include "tests/cli/error_text.h"
#include "tests/support/becomes_true.h"
#include "tests/support/temporary_folder.h"

namespace trireme::cli {
namespace {

using trireme::testing::becomes_true;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

RankCommand shell(const std::string& script) { return {{"/bin/sh", "-c", script}, {}}; }

// The command by which a shell tells the launcher that `peer` has caused a failure.
std::string tells_of(int peer) {
  const PeerFailure failure{ErrorCode::kPeerLost, peer};  // kTimeout is a newline to bash, which would cut the message
  std::ostringstream bytes;
  bytes << "F";
  for (const char byte : std::string_view(reinterpret_cast<const char*>(&failure), sizeof(failure)))
    bytes << "\\x" << std::hex << static_cast<int>(static_cast<unsigned char>(byte));
  return str("bash -c 'printf \"", bytes.str(), "\" >&${", kLauncherVariable, "%:*}'; ");
}

struct Finished {
  int exit_code;
  std::string out;
  std::string err;
  std::chrono::duration<double> seconds;
};

std::string text_in(FILE* file) {
  std::rewind(file);
  std::string text;
  for (int byte; (byte = std::fgetc(file)) != EOF;) text += static_cast<char>(byte);
  return text;
}

Finished supervise(std::vector<RankCommand> commands, SupervisorOptions options = {}) {
  FILE* out = std::tmpfile();
  FILE* err = std::tmpfile();
  options.out = fileno(out);
  options.err = fileno(err);
  const auto start = Clock::now();
  const auto verdict = Supervisor(std::move(commands), options).run();
  const auto seconds = Clock::now() - start;
  Finished finished{verdict.exit_code, text_in(out), text_in(err), seconds};
  std::fclose(out);
  std::fclose(err);
  return finished;
}

// A folder of this test alone.
class SupervisorFiles : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  int number_in(const std::string& name) const {
    int number = 0;
    std::ifstream(path(name)) >> number;
    return number;
  }

  testing::TemporaryFolder folder_;
};

bool is_alive(int pid) {
  // A zombie waits only for whoever inherited it, and does nothing any more.
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), {});
  return !text.empty() && text[text.rfind(')') + 2] != 'Z';
}

TEST(Supervisor, KeepsStdoutAndStderrApartAndPrefixesBoth) {
  const auto done = supervise({shell("echo out0; echo err0 >&2"), shell("printf 'out1\\nlast'; echo err1 >&2")});
  EXPECT_EQ(done.exit_code, 0);
  EXPECT_NE(done.out.find("[rank 0] out0\n"), std::string::npos);
  // Lines of the other rank may stand between the two.
  EXPECT_NE(done.out.find("[rank 1] out1\n"), std::string::npos);
  EXPECT_NE(done.out.find("[rank 1] last\n"), std::string::npos);
  EXPECT_EQ(done.out.find("err"), std::string::npos);
  EXPECT_NE(done.err.find("[rank 0] err0\n"), std::string::npos);
  EXPECT_EQ(done.err.find("out"), std::string::npos);
}

TEST(Supervisor, LeavesRankZeroUnprefixedWhenAsked) {
  const auto done =
      supervise({shell("printf '\\r10%%\\r20%%'"), shell("sleep 0.2; echo hello")}, {.prefix = Prefix::kAllButFirst});
  EXPECT_EQ(done.out, "\r10%\r20%\n[rank 1] hello\n");
}

TEST(Supervisor, LosesNothingOfALargeOutput) {
  const auto done = supervise({shell("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done")});
  EXPECT_EQ(std::count(done.out.begin(), done.out.end(), '\n'), 20000);
  EXPECT_TRUE(done.out.ends_with("[rank 0] line 19999\n"));
}

TEST(Supervisor, GivesRanksTheirVariablesAndAnEmptyInput) {
  const RankCommand command{{"sh", "-c", "echo $RANK of $WORLD_SIZE; cat"}, {{"RANK", "1"}, {"WORLD_SIZE", "2"}}};
  EXPECT_EQ(supervise({command}).out, "[rank 0] 1 of 2\n");
}

TEST(Supervisor, EndsTheOthersAndRepeatsTheFirstFailureLast) {
  const auto done = supervise({shell("sleep 60"), shell("echo it broke >&2; exit 7")});
  EXPECT_EQ(done.exit_code, 7);
  EXPECT_LT(done.seconds, 10s);
  EXPECT_TRUE(
      done.err.ends_with("trireme launch: after that: rank 0 ended by the launcher\n"
                         "trireme launch: rank 1 exited with code 7; its last lines:\n    it broke\n"))
      << done.err;
}

TEST(Supervisor, ReturnsTheSignalOfARankThatWasKilled) {
  const auto done = supervise({shell("sleep 60"), shell("echo working; kill -KILL $$")});
  EXPECT_EQ(done.exit_code, 128 + SIGKILL);
  EXPECT_NE(done.err.find("rank 1 was killed by SIGKILL"), std::string::npos) << done.err;
  EXPECT_TRUE(done.err.ends_with("its last lines:\n    working\n")) << done.err;
}

TEST(Supervisor, KillsARankThatIgnoresSigtermAfterTheGrace) {
  const auto done =
      supervise({shell("trap '' TERM; while :; do sleep 0.05; done"), shell("sleep 0.2; exit 4")}, {.grace = 300ms});
  EXPECT_EQ(done.exit_code, 4);
  EXPECT_LT(done.seconds, 10s);
}

TEST(Supervisor, WaitsForTheRankThatASurvivorBlames) {
  const auto done = supervise({shell(tells_of(1) + "exit 3"), shell("sleep 0.3; echo out of luck >&2; exit 9")});
  EXPECT_EQ(done.exit_code, 9);
  EXPECT_TRUE(done.err.ends_with("rank 1 exited with code 9; its last lines:\n    out of luck\n")) << done.err;
}

TEST(Supervisor, SaysThatARankWasStopped) {
  const auto done = supervise({shell("sleep 0.3; " + tells_of(1) + "exit 3"), shell("kill -STOP $$")},
                              {.grace = 2s, .settle = 100ms});
  EXPECT_EQ(done.exit_code, 3);
  EXPECT_NE(done.err.find("after that: rank 1 (it was stopped) ended by the launcher"), std::string::npos) << done.err;
}

TEST(Supervisor, RefusesAProgramThatIsNotThereBeforeAnythingStarts) {
  const auto start = [](const std::string& program) {
    return error_text([&] { Supervisor({{{program}, {}}}, {}).run(); });
  };
  EXPECT_EQ(start("/no/such/program"), "there is no program '/no/such/program'; correct its path");
  EXPECT_EQ(start("/tmp"), "there is no program '/tmp': this is a folder; name a file in it");
  EXPECT_EQ(start("surely_no_such_program"), "there is no program 'surely_no_such_program'; correct its path");
}

TEST_F(SupervisorFiles, RefusesAProgramThatMayNotBeExecuted) {
  std::ofstream(path("program")) << "#!/bin/sh\n";
  EXPECT_EQ(error_text([&] {
              Supervisor({{{path("program")}, {}}}, {}).run();
            }),
            "'" + path("program") + "' may not be executed; allow it with chmod +x");
}

TEST_F(SupervisorFiles, ReportsAProgramThatCannotBeExecuted) {
  const std::string script = path("script");
  std::ofstream(script) << "#!/no/such/interpreter\n";
  std::filesystem::permissions(script, std::filesystem::perms::owner_all);
  const auto done = supervise({{{script}, {}}});
  EXPECT_EQ(done.exit_code, 127);
  EXPECT_NE(done.err.find("cannot execute " + script + ": No such file or directory"), std::string::npos) << done.err;
}

TEST_F(SupervisorFiles, PassesSignalsOnAndLetsRanksEndByThemselves) {
  const std::string script =
      "trap 'sleep 0.3; echo saved; exit 130' INT; echo up > " + path("up") + "$RANK; while :; do sleep 0.05; done";
  std::thread user([&] {
    becomes_true([&] { return std::filesystem::exists(path("up0")) && std::filesystem::exists(path("up1")); });
    kill(getpid(), SIGINT);
  });
  const auto done =
      supervise({{{"/bin/sh", "-c", script}, {{"RANK", "0"}}}, {{"/bin/sh", "-c", script}, {{"RANK", "1"}}}});
  user.join();
  EXPECT_EQ(done.exit_code, 130);
  EXPECT_NE(done.out.find("[rank 0] saved\n"), std::string::npos);
  EXPECT_NE(done.out.find("[rank 1] saved\n"), std::string::npos);
}

TEST_F(SupervisorFiles, PassesARequestToSaveToRanksThatHandleItAndEndsNone) {
  const std::string handles = "trap 'echo save' USR1; touch " + path("ready") + "; while [ ! -e " + path("end") +
                              " ]; do sleep 0.05; done; echo done";
  const std::string does_not = "while [ ! -e " + path("end") + " ]; do sleep 0.05; done; echo done";
  std::thread sender([&] {
    EXPECT_TRUE(becomes_true([&] { return std::filesystem::exists(path("ready")); }));
    kill(getpid(), SIGUSR1);
    std::this_thread::sleep_for(300ms);
    std::ofstream(path("end")) << "now";
  });
  const auto done = supervise({shell(handles), shell(does_not)});
  sender.join();
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_NE(done.out.find("[rank 0] save\n"), std::string::npos) << done.out;
  EXPECT_NE(done.out.find("[rank 0] done\n"), std::string::npos) << done.out;
  EXPECT_NE(done.out.find("[rank 1] done\n"), std::string::npos) << done.out;
  EXPECT_EQ(done.err,
            "trireme launch: SIGUSR1 is not passed to rank 1, which does not handle it and would be ended by it\n");
}

TEST_F(SupervisorFiles, KillsAtTheThirdSignalWhateverTheGrace) {
  std::thread user([&] {
    becomes_true([&] { return std::filesystem::exists(path("up")); });
    for (int i = 0; i < 3; ++i) {
      kill(getpid(), SIGINT);
      std::this_thread::sleep_for(300ms);
    }
  });
  const auto done =
      supervise({shell("trap '' INT TERM; echo up > " + path("up") + "; while :; do sleep 0.05; done")}, {.grace = 8s});
  user.join();
  EXPECT_LT(done.seconds, 5s);
  EXPECT_EQ(done.exit_code, 130);
  EXPECT_EQ(done.err, "trireme launch: after SIGINT, rank 0 did not end by itself; the launcher ended it (SIGKILL)\n");
}

TEST_F(SupervisorFiles, EndsThoughADaemonKeepsWritingIntoTheRanksOutput) {
  // Whoever reads the launcher's output is slower than the daemon, so that the rank's pipe is never empty.
  auto out = make_pipe();
  std::thread reader([&] {
    char buffer[64 * 1024];
    while (read(out.read_end.get(), buffer, sizeof(buffer)) > 0) std::this_thread::sleep_for(5ms);
  });
  const auto daemon = "setsid sh -c 'echo $$ > " + path("daemon") + "; exec yes' & ";
  const auto rank = shell(daemon + "while [ ! -s " + path("daemon") + " ]; do sleep 0.02; done");
  EXPECT_EQ(Supervisor({rank}, {.out = out.write_end.get()}).run().exit_code, 0);
  out.write_end.reset();
  reader.join();
  ASSERT_GT(number_in("daemon"), 0);
  kill(number_in("daemon"), SIGKILL);  // it has left the rank's group, so it is on its own
}

TEST_F(SupervisorFiles, LeavesNoProcessThatARankHasStarted) {
  const auto done = supervise({shell("sleep 300 & echo $! > " + path("child"))});
  EXPECT_EQ(done.exit_code, 0);
  ASSERT_GT(number_in("child"), 0);
  EXPECT_TRUE(becomes_true([&] { return !is_alive(number_in("child")); }));
}

TEST_F(SupervisorFiles, LeavesNoOrphanWhenTheLauncherItselfIsKilled) {
  const pid_t launcher = fork();
  if (launcher == 0) {
    const std::string script = "sleep 300 & echo $! > " + path("child") + "; echo $$ > " + path("rank") + "; wait";
    Supervisor({shell(script)}, {}).run();
    _exit(0);
  }
  ASSERT_TRUE(becomes_true([&] { return number_in("rank") > 0 && number_in("child") > 0; }));
  EXPECT_TRUE(is_alive(number_in("rank")));
  kill(launcher, SIGKILL);
  waitpid(launcher, nullptr, 0);
  EXPECT_TRUE(becomes_true([&] { return !is_alive(number_in("rank")); }));
  EXPECT_TRUE(becomes_true([&] { return !is_alive(number_in("child")); }));
}

}  // namespace
}  // namespace trireme::cli
