// Refusals of `trireme train`, and how it ends when the machine does not go along: one line that names the flag and a
// fix.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <regex>
#include <thread>

#include "tests/cli/train_runs.h"

namespace trireme::cli {
namespace {

using namespace std::chrono_literals;

class TrainProgramRefuses : public TrainProgram {
 protected:
  // Exit code 2 and `complaint`, told once, by nobody but the command that was typed.
  void expect_refusal(const std::vector<std::string>& words, const std::string& complaint) {
    const auto done = run_program(words);
    EXPECT_EQ(done.exit_code, 2) << done.err;
    EXPECT_EQ(done.err, "trireme train: " + complaint + "\n");
  }
};

TEST_F(TrainProgramRefuses, AFolderThatAnotherRunWritesTo) {
  const auto out = folder_ / "run";
  const std::string complaint =
      "--out " + out + ": another run writes there; wait until it has ended, or choose another folder";
  Program first(train("run", {"--steps", "100000", "--save-every", "3"}));
  for (int i = 0; i < 3000 && losses_of("run").size() < 3; ++i) std::this_thread::sleep_for(20ms);
  ASSERT_GE(losses_of("run").size(), 3u) << first.err();
  expect_refusal(train("run", {"--steps", "4"}), complaint);
  expect_refusal(train("run", {"--steps", "4", "--resume"}), complaint);
  expect_refusal(with(train("run", {"--steps", "4", "--resume"}), "--ranks", "1"), complaint);
  first.signal(SIGKILL);
  EXPECT_EQ(first.wait().exit_code, 137);
  // The ranks die with their parent, but not before it.
  std::this_thread::sleep_for(500ms);
  const auto resumed = run_program(train("run", {"--steps", "4", "--resume"}));
  EXPECT_EQ(resumed.exit_code, 0) << resumed.err;
}

TEST_F(TrainProgramRefuses, AFolderThatCannotBeWrittenTo) {
  const auto file = folder_.write("file", "");
  for (const std::string ranks : {"1", "2"}) {
    const auto words = with(train("", {"--steps", "1"}), "--ranks", ranks);
    expect_refusal(with(words, "--out", file), "--out " + file + ": this is a file; name a folder");
    expect_refusal(with(words, "--out", file + "/run"),
                   "--out " + file + "/run: the folder cannot be made: Not a directory; choose another folder");
    expect_refusal(with(words, "--out", "/proc/run"),
                   "--out /proc/run: the folder cannot be made: No such file or directory; choose another folder");
    expect_refusal(with(words, "--out", "/proc/self"),
                   "--out /proc/self: no file can be written there: No such file or directory; choose another folder");
    // A loop of links keeps a path from being followed at all, as a folder above it that may not be read.
    const auto loop = folder_ / ("loop" + ranks);
    std::filesystem::create_symlink(loop, loop);
    expect_refusal(
        with(words, "--out", loop + "/run"),
        "--out " + loop + "/run: the folder cannot be made: Too many levels of symbolic links; choose another folder");
  }
}

TEST_F(TrainProgramRefuses, ACheckpointFolderThatCannotBeWrittenToBeforeTheFirstStep) {
  const auto file = folder_.write("run/checkpoints", "");
  const auto out = folder_ / "run";
  const std::string complaint = "--out " + out + ": checkpoints cannot be written to " + file +
                                ": Not a directory; make it a folder that may be written to, or choose another --out";
  for (const std::string ranks : {"1", "2"})
    expect_refusal(with(train("run", {"--steps", "1", "--resume-if-there"}), "--ranks", ranks), complaint);
  // Ranks of a launcher: rank 0 looks, and the others tell what it found.
  std::vector<std::string> words = {"launch", "--num_gpus", "2", program_path()};
  const auto own = train("run", {"--steps", "1", "--resume-if-there"});
  words.insert(words.end(), own.begin(), own.end());
  const auto done = run_program(words);
  EXPECT_EQ(done.exit_code, 2) << done.err;
  EXPECT_NE(done.err.find(" ended with an error:\n"), std::string::npos) << done.err;
  EXPECT_NE(done.err.find(complaint), std::string::npos) << done.err;
  EXPECT_FALSE(std::filesystem::exists(out + "/metrics.jsonl"));
  EXPECT_FALSE(std::filesystem::exists(out + "/.tmp-probe"));
}

TEST_F(TrainProgramRefuses, AFileOfWeightsAsAModel) {
  const auto weights = folder_.write("w.safetensors", std::string("\x10\0\0\0\0\0\0\0{\"w\":{}}", 16));
  expect_refusal(with(train("run", {"--steps", "1"}), "--model", weights),
                 "model `" + weights +
                     "` is a binary file, such as one of weights; give a built-in model or the path of a config.json, "
                     "and safetensors as first weights: `trireme train --init-from " +
                     weights + "`");
}

// Root may read everything, so a test that runs as root becomes somebody else.
TEST_F(TrainProgramRefuses, AFolderBelowOneThatMayNotBeRead) {
  const auto locked = folder_ / "locked";
  std::filesystem::create_directories(locked);
  using std::filesystem::perms;
  std::filesystem::permissions(locked, perms::none);
  std::filesystem::permissions(folder_.path(), perms(0755));
  std::vector<std::string> words;
  if (geteuid() == 0) {
    if (access("/usr/bin/setpriv", X_OK) != 0) GTEST_SKIP() << "setpriv (util-linux) is not there";
    words = {"/usr/bin/setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", program_path()};
    auto asks = words;
    asks.push_back("--version");
    if (run_program(asks).exit_code != 0) GTEST_SKIP() << "another user may not run " << program_path();
  } else {
    words = {program_path()};
  }
  const auto train_words = with(with(train("", {"--steps", "1"}), "--ranks", "1"), "--out", locked + "/run");
  words.insert(words.end(), train_words.begin(), train_words.end());
  const auto done = run_program(words);
  std::filesystem::permissions(locked, perms::owner_all);
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_EQ(done.err, "trireme train: --out " + locked +
                          "/run: the folder cannot be made: Permission denied; choose another folder\n");
}

TEST_F(TrainProgramRefuses, ManyTimesMoreRanksThanCores) {
  const auto done = run_program(with(train("run", {"--steps", "1"}), "--ranks", "4096"));
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_TRUE(std::regex_match(
      done.err,
      std::regex("trireme train: --ranks 4096: each rank is a process with memory of its own, and this machine "
                 "has [0-9]+ cores?; give at most [0-9]+, or --oversubscribe to start them all the same\n")))
      << done.err;
}

TEST_F(TrainProgramRefuses, AModelThatNoMemoryHolds) {
  const auto model = folder_.write("huge.json",
                                   R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 1024,
      "intermediate_size": 34359738368, "num_hidden_layers": 1, "num_attention_heads": 2})");
  for (const std::string ranks : {"1", "2"}) {
    const auto done =
        run_program(with(with(train("run" + ranks, {"--steps", "1"}), "--model", model), "--ranks", ranks));
    EXPECT_EQ(done.exit_code, 1) << done.err;
    EXPECT_NE(
        done.err.find("trireme train: out of memory: 141 TB were asked for at once; lower the micro-batch (--batch, "
                      "or train_micro_batch_size_per_gpu in the configuration) or --seq, or take a smaller model"),
        std::string::npos)
        << done.err;
    EXPECT_EQ(done.err.find("DefaultCPUAllocator"), std::string::npos) << done.err;
  }
}

TEST_F(TrainProgramRefuses, ToResumeWithSomethingElse) {
  ASSERT_EQ(run_program(train("run", {"--steps", "2"})).exit_code, 0);
  const auto saved = folder_ / "run/checkpoints/global_step2";
  const auto resumed = train("run", {"--steps", "9", "--resume"});
  const auto started_with = [&](const std::string& flag, const std::string& value, const std::string& other) {
    auto words = resumed;
    words.insert(words.end(), {flag, value});
    const std::string said = flag + " " + value + ": the run in " + (folder_ / "run") + " was started with ";
    expect_refusal(words, said + other + "; leave the flag out, or choose another --out");
  };
  started_with("--seq", "16", "--seq 32");
  started_with("--seed", "6", "--seed 5");
  started_with("--data-format", "uint16", "--data-format auto");
  started_with("--exclude", "b*", "no --exclude");
  started_with("--init-from", "w.safetensors", "no --init-from");
  const auto wider = folder_.write("wider.json", std::regex_replace(contents_of(model_), std::regex("64"), "96"));
  expect_refusal(with(resumed, "--model", wider),
                 "--model " + wider + ": " + saved +
                     " holds another model (intermediate_size is 64 there, 96 here); give that one, or choose another "
                     "--out");
  const auto other = folder_.write("other/story.txt", std::string(50000, 'x'));
  expect_refusal(with(resumed, "--data", other),
                 "--data " + other + ": " + saved +
                     " was trained on other files; give those, with the same --exclude and --data-format, or choose "
                     "another --out");
  // A run of an older version has no record: its checkpoint alone tells.
  std::filesystem::remove(folder_ / "run/run.json");
  expect_refusal(with(resumed, "--seq", "16"),
                 "--seq 16: " + saved + " was trained with --seq 32; give that, or choose another --out");
  expect_refusal(with(resumed, "--seed", "6"),
                 "--seed 6: " + saved + " was trained with --seed 5; give that, or choose another --out");
  expect_refusal({"train", "--resume", "--out", folder_ / "run"},
                 "--data is required: " + (folder_ / "run") +
                     " has no run.json that says what its run was started with; give the run's flags, or "
                     "the folder of a run as --out");
  folder_.write("run/run.json", "{\"flags\": 3}");
  expect_refusal({"train", "--resume", "--out", folder_ / "run"},
                 "--resume: " + (folder_ / "run/run.json") +
                     ": this is no record of a run; remove the file, and give the run's flags again");
}

TEST_F(TrainProgramRefuses, DataThatIsTooShortInWordsOfItsFlags) {
  const auto done = run_program(with(train("run", {"--steps", "1"}), "--data", folder_.write("short.txt", "abc")));
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_NE(done.err.find("needs seq + 1 = 33; give more data or a smaller seq\n"), std::string::npos) << done.err;
}

TEST_F(TrainProgramRefuses, ToHideThatNothingIsLeftToDo) {
  ASSERT_EQ(run_program(train("run", {"--steps", "3"})).exit_code, 0);
  const auto done = run_program(train("run", {"--steps", "2", "--resume"}));
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_NE(done.err.find("nothing is left to train: 3 steps are done, --steps is 2; give a larger --steps to go on\n"),
            std::string::npos)
      << done.err;
  EXPECT_NE(done.out.find("validation loss "), std::string::npos) << done.out;
}

// A limit on the size of files stands for a full disk: what cannot be written fails in the same call.
TEST_F(TrainProgramRefuses, ToLoseTheCheckpointBeforeAFullDisk) {
  // A shard of 4.3 MB, and no other file that comes near it.
  const auto config =
      folder_.write("copy.json", R"({"zero_optimization": {"stage": 0}, "trireme": {"gather": "copy"}})");
  const auto model = folder_.write("mid.json",
                                   R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 128,
      "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": true})");
  const auto to_step = [&](const std::string& steps, const std::string& out) {
    const auto words = train(out, {"--steps", steps, "--config", config, "--resume-if-there"});
    return with(with(words, "--ranks", "1"), "--model", model);
  };
  const auto limited = [&](const std::string& out) {
    // 4000 blocks are 2 MB in one shell, 4 MB in another.
    std::vector<std::string> words = {"/bin/sh", "-c", "ulimit -f 4000; exec \"$0\" \"$@\"", program_path()};
    const auto more = to_step("4", out);
    words.insert(words.end(), more.begin(), more.end());
    return run_program(words);
  };
  ASSERT_EQ(run_program(to_step("2", "run")).exit_code, 0);
  const auto full = limited("run");
  EXPECT_EQ(full.exit_code, 1) << full.err;
  EXPECT_NE(full.err.find("File too large; raise the limit on the size of files (ulimit -f); checkpoint global_step2 "
                          "is intact: when this is mended, continue with " +
                          program_path() + " train --resume --out " + (folder_ / "run") + "\n"),
            std::string::npos)
      << full.err;
  EXPECT_EQ(run_program(to_step("4", "run")).exit_code, 0);
  EXPECT_EQ(losses_of("run").size(), 4u);
  const auto first = limited("new");
  EXPECT_NE(first.err.find("File too large; raise the limit on the size of files (ulimit -f); there is no checkpoint "
                           "yet: when this is mended, start anew with " +
                           program_path() + " train --resume-if-there --out " + (folder_ / "new") + "\n"),
            std::string::npos)
      << first.err;
}

}  // namespace
}  // namespace trireme::cli
