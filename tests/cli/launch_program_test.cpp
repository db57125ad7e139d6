// `trireme launch` as a user meets it.
#include <gtest/gtest.h>
#include <signal.h>

#include <filesystem>

#include "tests/cli/program.h"

namespace trireme::cli {
namespace {

TEST(LaunchProgram, StartsTheRanksAndPassesFlagsOfTheProgramOn) {
  const auto done = run_program(
      {"launch", "--num_gpus", "2", "/bin/sh", "-c", "echo $RANK/$WORLD_SIZE $MASTER_ADDR $0", "--num_gpus=9"});
  EXPECT_EQ(done.exit_code, 0);
  EXPECT_NE(done.out.find("[rank 0] 0/2 127.0.0.1 --num_gpus=9\n"), std::string::npos) << done.out;
  EXPECT_NE(done.out.find("[rank 1] 1/2 127.0.0.1 --num_gpus=9\n"), std::string::npos) << done.out;
}

TEST(LaunchProgram, ReturnsTheFirstFailuresCodeAndSaysWhyLast) {
  const auto done = run_program(
      {"launch", "--num_ranks", "2", "/bin/sh", "-c", "[ $RANK = 0 ] && sleep 60; echo no more >&2; exit 42"});
  EXPECT_EQ(done.exit_code, 42);
  EXPECT_TRUE(done.err.ends_with("trireme launch: rank 1 exited with code 42; its last lines:\n    no more\n"))
      << done.err;
}

TEST(LaunchProgram, RunsScriptsUnderThePythonThatTheBuildIsFor) {
  const auto build = std::filesystem::path(program_path()).parent_path().parent_path();
  const std::string python = contents_of(build / "share/trireme/python");
  if (python.empty()) GTEST_SKIP() << "built without Python";
  const TemporaryFolder folder;
  const auto script = folder.write("script.py", "import sys; print(sys.executable)\n");
  const auto executable = [&](const std::string& named) {
    return run_program({"launch", "--prefix", "none", script}, {{"TRIREME_PYTHON", named}}).out;
  };
  EXPECT_EQ(executable(""), python);
  EXPECT_EQ(executable("/usr/bin/python3"), "/usr/bin/python3\n");
}

TEST(LaunchProgram, LetsScriptsOfABuildTreeImportItsPackage) {
  const auto packages = std::filesystem::path(program_path()).parent_path().parent_path() / "python";
  std::string files;
  std::error_code none;
  for (const auto& entry : std::filesystem::directory_iterator(packages / "trireme", none))
    files += entry.path().filename().string() + " ";
  if (files.find("_core.cpython") == std::string::npos) GTEST_SKIP() << "built without Python";
  const TemporaryFolder folder;
  const auto script = folder.write(
      "script.py",
      "import importlib.util, os; print(importlib.util.find_spec('trireme').origin, os.environ['PYTHONPATH'])\n");
  const auto origin = (packages / "trireme/__init__.py").string();
  const auto said = [&](const std::string& path) {
    return run_program({"launch", "--prefix", "none", script}, {{"PYTHONPATH", path}}).out;
  };
  EXPECT_EQ(said(""), origin + " " + packages.string() + "\n");
  EXPECT_EQ(said("/mine"), origin + " /mine:" + packages.string() + "\n");
}

TEST(LaunchProgram, SaysOnceThatAScriptIsNotThere) {
  for (const std::string command : {"launch", "deepspeed"}) {
    const auto done = run_program({command, "--num_gpus", "2", "/nowhere/train.py", "--lr", "1"});
    EXPECT_EQ(done.exit_code, 2);
    EXPECT_EQ(done.err, "trireme " + command + ": script /nowhere/train.py: there is no such file; correct its path\n");
  }
}

TEST(LaunchProgram, KeepsALogOfEachRank) {
  const TemporaryFolder folder;
  const auto logs = folder / "new/logs";
  const auto done = run_program({"launch", "--num_gpus", "2", "--log-dir", logs, "/bin/sh", "-c",
                                 "echo out $RANK; sleep 0.2; printf 'err %s' $RANK >&2"});
  EXPECT_EQ(done.exit_code, 0) << done.err;
  for (const std::string rank : {"0", "1"})
    EXPECT_EQ(contents_of(logs + "/rank-" + rank + ".log"), "out " + rank + "\nerr " + rank);
  const auto refused = run_program({"launch", "--log-dir", "/dev/null/logs", "/bin/true"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("--log-dir /dev/null/logs"), std::string::npos) << refused.err;
}

TEST(LaunchProgram, KeepsItsNumberInAFileWhileItRuns) {
  const auto done =
      run_program({"launch", "--prefix", "none", "--save_pid", "/bin/sh", "-c", "echo $PPID; cat /tmp/$PPID.ds"});
  EXPECT_EQ(done.exit_code, 0) << done.err;
  const std::string number = done.out.substr(0, done.out.find('\n'));
  EXPECT_EQ(done.out, number + "\n" + number);
  EXPECT_FALSE(std::filesystem::exists("/tmp/" + number + ".ds"));
}

TEST(LaunchProgram, ShowsTheErrorOfItsOwnCommandsOnceForAllRanks) {
  const auto done = run_program({"launch", "--num_gpus", "2", program_path(), "inspect", "/nowhere"});
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_TRUE(done.err.ends_with(" ended with an error:\n    /nowhere: there is no such file or folder\n")) << done.err;
  EXPECT_EQ(done.err.find("/nowhere"), done.err.rfind("/nowhere")) << done.err;
}

TEST(LaunchProgram, TakesADoubleDashBeforeTheProgram) {
  EXPECT_EQ(run_program({"launch", "--prefix", "none", "--", "/bin/echo", "--hostfile"}).out, "--hostfile\n");
}

TEST(LaunchProgram, GoesOnWhenNobodyReadsItsOutput) {
  const TemporaryFolder folder;
  const auto script = "echo a; echo b >&2; sleep 0.3; echo c; echo d >&2; sleep 0.3; echo done > " + (folder / "done");
  const auto done = run_program({"launch", "/bin/sh", "-c", script}, {}, Output::kClosedPipe);
  EXPECT_EQ(done.exit_code, 0);
  EXPECT_EQ(contents_of(folder / "done"), "done\n");
}

TEST(LaunchProgram, LeavesTheRanksTheirOwnWayWithClosedPipes) {
  // `yes` complains on stderr where SIGPIPE is ignored, instead of ending quietly.
  const auto done = run_program({"launch", "/bin/sh", "-c", "yes | head -n 1"});
  EXPECT_EQ(done.out, "[rank 0] y\n");
  EXPECT_EQ(done.err, "");
}

TEST(LaunchProgram, RunsOnTheSlotsThatAreIncluded) {
  const TemporaryFolder folder;
  const auto hosts = folder.write("hosts", "localhost slots=4\n");
  const auto done = run_program(
      {"launch", "--hostfile", hosts, "-i", "localhost:1,3", "/bin/sh", "-c", "echo $CUDA_VISIBLE_DEVICES"});
  EXPECT_NE(done.out.find("[rank 0] 1,3\n"), std::string::npos) << done.out;
  EXPECT_NE(done.out.find("[rank 1] 1,3\n"), std::string::npos) << done.out;
}

}  // namespace
}  // namespace trireme::cli
