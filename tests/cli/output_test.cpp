// The fate of a result that stdout does not take.
#include <gtest/gtest.h>

#include "tests/cli/train_runs.h"

namespace trireme::cli {
namespace {

class LostOutput : public TrainProgram {
 protected:
  // Exit code 1, and the last line says why.
  static void expect_told(const std::vector<std::string>& words, const std::string& name,
                          const std::string& more = "") {
    const auto done = run_program(words, {}, Output::kFullDisk);
    EXPECT_EQ(done.exit_code, 1) << done.err;
    const std::string line =
        name + ": stdout: No space left on device; not all of the output was written: send it elsewhere" + more + "\n";
    EXPECT_TRUE(done.err.ends_with(line)) << done.err;
  }
};

TEST_F(LostOutput, FailsEveryCommandThatPrints) {
  expect_told({"--version"}, "trireme");
  expect_told({"--help"}, "trireme");
  expect_told({"train", "--help"}, "trireme");
  expect_told({"docs"}, "trireme docs");
  expect_told({"estimate", "--params", "1e9"}, "trireme estimate");
  expect_told({"estimate", "--params", "1e9", "--json"}, "trireme estimate");
  expect_told({"plan", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"}, "trireme plan");
  const auto config = folder_.write("ds.json", R"({"train_micro_batch_size_per_gpu": 1})");
  expect_told({"config", "check", config}, "trireme config check");
  expect_told({"launch", "/bin/echo", "a result"}, "trireme launch");
  expect_told({"deepspeed", "--no_python", "/bin/echo", "a result"}, "trireme deepspeed");
}

TEST_F(LostOutput, FailsTrainingWhoseResultIsThenFoundInTheRunsFolder) {
  const auto alone = with(train("alone", {"--steps", "2"}), "--ranks", "1");
  expect_told(alone, "trireme train",
              "; the validation loss and the sample are in " + (folder_ / "alone/metrics.jsonl") + " too");
  EXPECT_NE(contents_of(folder_ / "alone/metrics.jsonl").find(R"("reason":"finished")"), std::string::npos);
  expect_told(train("two", {"--steps", "2"}), "trireme train");
  const auto run = folder_ / "alone";
  expect_told({"generate", "--checkpoint", run, "--tokens", "4"}, "trireme generate");
  expect_told({"inspect", run}, "trireme inspect");
  expect_told({"consolidate", run, folder_ / "weights"}, "trireme consolidate");
  expect_told({"convert", run, folder_ / "converted", "--to", "dcp"}, "trireme convert");
}

TEST_F(LostOutput, DoesNotHideThatARankFailed) {
  const auto done = run_program({"launch", "/bin/sh", "-c", "echo said; exit 42"}, {}, Output::kFullDisk);
  EXPECT_EQ(done.exit_code, 42) << done.err;
  EXPECT_NE(done.err.find("trireme launch: stdout: No space left on device"), std::string::npos) << done.err;
}

}  // namespace
}  // namespace trireme::cli
