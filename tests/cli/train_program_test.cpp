// `trireme train` end to end, on a tiny model.
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <regex>
#include <sstream>
#include <thread>

#include "tests/cli/program.h"
#include "trireme/base/json.h"

namespace trireme::cli {
namespace {

using namespace std::chrono_literals;

bool becomes_true(const std::function<bool()>& condition, std::chrono::seconds within = 60s) {
  for (const auto deadline = std::chrono::steady_clock::now() + within; std::chrono::steady_clock::now() < deadline;) {
    if (condition()) return true;
    std::this_thread::sleep_for(20ms);
  }
  return false;
}

class TrainProgram : public ::testing::Test {
 protected:
  TrainProgram() {
    std::string text;
    for (int i = 0; i < 6000; ++i) text += "line " + std::to_string(i * 7919 % 1000) + " of the story\n";
    data_ = folder_.write("data/story.txt", text);
    model_ = folder_.write("tiny.json",
                           R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": true})");
  }

  std::vector<std::string> train(const std::string& out, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"train", "--model",        model_, "--data", data_,        "--seq",
                                          "32",    "--batch",        "2",    "--seed", "5",          "--ranks",
                                          "2",     "--eval-samples", "16",   "--out",  folder_ / out};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  // Steps and losses of a run's metrics, as written.
  std::vector<std::string> losses_of(const std::string& out) const {
    std::vector<std::string> losses;
    std::istringstream lines(contents_of(folder_ / (out + "/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const auto json = Json::parse(line);
      if (!json.contains("event")) losses.push_back(json["step"].dump() + ": " + json["loss"].dump());
    }
    return losses;
  }

  // The saved tensors of the last checkpoint, file by file.
  std::string weights_of(const std::string& out) const {
    const std::filesystem::path checkpoints = folder_ / (out + "/checkpoints");
    auto tag = contents_of(checkpoints / "latest");
    tag.erase(tag.find_last_not_of('\n') + 1);
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(checkpoints / tag)) {
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    std::string bytes;
    for (const auto& file : files) bytes += file.filename().string() + contents_of(file);
    return bytes;
  }

  TemporaryFolder folder_;
  std::string data_;
  std::string model_;
};

TEST_F(TrainProgram, TrainsOnTwoRanksAndEndsWithTheValidationLoss) {
  const auto done = run_program(train("run", {"--steps", "20"}));
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_TRUE(std::regex_match(done.last_line(), std::regex("validation loss [0-9]+\\.[0-9]{4}"))) << done.out;
  EXPECT_EQ(losses_of("run").size(), 20u);
  EXPECT_NE(contents_of(folder_ / "run/report.html").find("<html"), std::string::npos);
  EXPECT_NE(contents_of(folder_ / "run/resolved_config.json").find("\"stage\": 3"), std::string::npos);
}

TEST_F(TrainProgram, ContinuesBitForBitWhereItWasSaved) {
  ASSERT_EQ(run_program(train("whole", {"--steps", "12", "--save-every", "6", "--keep", "0"})).exit_code, 0);
  // The same run, cut at step 6: what came later is taken away.
  std::filesystem::copy(folder_ / "whole", folder_ / "cut", std::filesystem::copy_options::recursive);
  std::filesystem::remove_all(folder_ / "cut/checkpoints/global_step12");
  folder_.write("cut/checkpoints/latest", "global_step6");
  const auto resumed = run_program(train("cut", {"--steps", "12", "--resume"}));
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(losses_of("cut"), losses_of("whole"));
  EXPECT_EQ(weights_of("cut"), weights_of("whole"));
  EXPECT_FALSE(weights_of("cut").empty());
}

TEST_F(TrainProgram, ResumesFromNothingByStartingAnew) {
  const auto done = run_program(train("new", {"--steps", "2", "--resume"}));
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(losses_of("new").size(), 2u);
}

TEST_F(TrainProgram, SavesAndEndsCleanlyOnCtrlC) {
  Program program(train("stopped", {"--steps", "100000"}));
  ASSERT_TRUE(becomes_true([&] { return losses_of("stopped").size() >= 3; })) << program.err();
  program.signal(SIGINT);
  const auto done = program.wait();
  EXPECT_EQ(done.exit_code, 130) << done.err;
  EXPECT_NE(done.err.find("continue with --resume --out " + (folder_ / "stopped")), std::string::npos) << done.err;
  const auto steps = losses_of("stopped").size();
  EXPECT_TRUE(std::filesystem::exists(folder_ / ("stopped/checkpoints/global_step" + std::to_string(steps))));
  const auto more = run_program(train("stopped", {"--steps", std::to_string(steps + 2), "--resume"}));
  EXPECT_EQ(more.exit_code, 0) << more.err;
  EXPECT_EQ(losses_of("stopped").size(), steps + 2);
}

TEST_F(TrainProgram, NamesTheRankThatWasKilled) {
  Program program(train("killed", {"--steps", "100000"}));
  ASSERT_TRUE(becomes_true([&] { return losses_of("killed").size() >= 3; })) << program.err();
  // Ranks are the supervisor's children; the guard has another command line.
  std::istringstream children(
      contents_of("/proc/" + std::to_string(program.pid()) + "/task/" + std::to_string(program.pid()) + "/children"));
  pid_t last = 0;
  for (pid_t child = 0; children >> child;) last = child;
  ASSERT_GT(last, 0);
  kill(last, SIGKILL);
  const auto done = program.wait();
  EXPECT_EQ(done.exit_code, 137);
  EXPECT_NE(done.err.find("trireme train: rank 1 was killed by SIGKILL"), std::string::npos) << done.err;
}

TEST_F(TrainProgram, ReadsItsFirstWeightsFromAFileThatAnotherRunSaved) {
  ASSERT_EQ(run_program(train("first", {"--steps", "2"})).exit_code, 0);
  const auto wrong = run_program(train("second", {"--steps", "2", "--init-from", data_}));
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_NE(wrong.err.find("story.txt"), std::string::npos) << wrong.err;
}

TEST_F(TrainProgram, WritesTextFromItsCheckpoint) {
  ASSERT_EQ(run_program(train("run", {"--steps", "4"})).exit_code, 0);
  const std::vector<std::string> words = {"generate", "--checkpoint", folder_ / "run", "--prompt", "line 1", "--tokens",
                                          "20"};
  const auto text = run_program(words);
  EXPECT_EQ(text.exit_code, 0) << text.err;
  EXPECT_TRUE(text.out.starts_with("line 1")) << text.out;
  EXPECT_EQ(run_program(words).out, text.out);
  auto one = words;
  one[2] = folder_ / "run/checkpoints/global_step4";
  EXPECT_EQ(run_program(one).out, text.out);
}

}  // namespace
}  // namespace trireme::cli
