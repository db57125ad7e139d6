// `trireme train` in the stages of a pipeline.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <regex>
#include <sstream>

#include "tests/cli/train_runs.h"
#include "tests/support/becomes_true.h"
#include "tests/support/parameters.h"
#include "trireme/formats/safetensors.h"
#include "trireme/models/language_model.h"

namespace trireme::cli {
namespace {

using trireme::testing::becomes_true;

class TrainStages : public TrainProgram {
 protected:
  TrainStages() {
    gpt_ = folder_.write("gpt.json", R"({"model_type": "gpt2", "vocab_size": 256, "n_embd": 32, "n_layer": 2,
        "n_head": 2, "n_positions": 64})");
  }

  // A configuration of four micro-batches with the keys of `more`.
  std::string config(const std::string& name, const std::string& more) const {
    return folder_.write(name + ".json", R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, )" +
                                             more + "}");
  }

  void expect_refusal(const std::string& config, const std::string& ranks, const std::string& complaint) {
    auto words = with(train("refused", {"--steps", "1", "--config", config}), "--ranks", ranks);
    words.erase(std::find(words.begin(), words.end(), "--batch"), std::find(words.begin(), words.end(), "--seed"));
    const auto done = run_program(words);
    EXPECT_EQ(done.exit_code, 2) << done.err;
    EXPECT_NE(done.err.find(complaint), std::string::npos) << done.err;
    EXPECT_FALSE(std::filesystem::exists(folder_ / "refused/metrics.jsonl"));
  }

  std::vector<std::string> run(const std::string& out, const std::string& config, const std::string& ranks,
                               const std::vector<std::string>& more) const {
    auto words = with(train(out, more), "--ranks", ranks);
    words.erase(std::find(words.begin(), words.end(), "--batch"), std::find(words.begin(), words.end(), "--seed"));
    words.insert(words.end(), {"--config", config});
    return words;
  }

  std::string gpt_;
};

// A checkpoint of whole models goes on in two stages of two ranks, with any schedule and ZeRO stage.
TEST_F(TrainStages, GoOnWhereWholeModelsWere) {
  const auto whole = config("whole", R"("zero_optimization": {"stage": 3})");
  const auto done = run_program(run("whole", whole, "2", {"--steps", "8", "--save-every", "4", "--keep", "0"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const auto expected = numbers_of("whole", "loss");
  for (
      const auto& [name, keys] : std::map<std::string, std::string>{
          {"v", R"("zero_optimization": {"stage": 3}, "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
                    "trireme": {"pipeline": {"schedule": "zb-v", "chunks": 2}})"},
          {"uniform", R"("zero_optimization": {"stage": 1}, "pipeline": {"stages": 2, "partition": "uniform"})"},
          {"parts", R"("zero_optimization": {"stage": 1}, "pipeline": {"stages": 2}, "sequence_parallel_size": 2)"},
          {"slices",
           R"("zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}, "tensor_parallel": {"autotp_size": 2})"}}) {
    cut("whole", name, 4);
    const auto staged = run_program(run(name, config(name, keys), "4", {"--steps", "8", "--resume"}));
    ASSERT_EQ(staged.exit_code, 0) << staged.err;
    const std::string of_axis = name == "slices"  ? ", layers cut over 2 ranks"
                                : name == "parts" ? ", sequences cut over 2 ranks"
                                                  : "";
    EXPECT_NE(staged.err.find("2 pipeline stages" + of_axis + " on 4 ranks"), std::string::npos) << staged.err;
    const auto losses = numbers_of(name, "loss");
    ASSERT_EQ(losses.size(), 8u);
    for (size_t step = 4; step < 8; ++step) EXPECT_NEAR(losses[step], expected[step], 1e-5) << name << step;
    EXPECT_EQ(staged.last_line(), done.last_line());  // the validation loss
  }
  const auto text = run_program({"generate", "--checkpoint", folder_ / "v", "--prompt", "line 1", "--tokens", "5"});
  EXPECT_TRUE(text.out.starts_with("line 1")) << text.err;
}

TEST_F(TrainStages, StartWithTheWeightsOfAFile) {
  const auto staged = folder_.write("two.json", R"({"pipeline": {"stages": 2}, "optimizer": {"type": "AdamW"}})");
  for (const std::string& path : {model_, gpt_}) {
    const auto weights = testing::parameters_of(*make_language_model(model_options(path)));
    const auto file = folder_ / "w.safetensors";
    write_safetensors(file, {weights.begin(), weights.end()});
    const std::string out = path == gpt_ ? "gpt" : "llama";
    const auto done = run_program(
        with(train(out, {"--steps", "1", "--lr", "0", "--init-from", file, "--config", staged}), "--model", path));
    ASSERT_EQ(done.exit_code, 0) << done.err;
    expect_same_weights(saved_weights(out), weights);
  }
}

// 21 samples: full micro-batches, equal parts of the rest, and one for every data-parallel rank alike.
TEST_F(TrainStages, ValidateEachSampleOnce) {
  const auto whole = config("whole", R"("zero_optimization": {"stage": 0})");
  const auto staged = config("staged", R"("pipeline": {"stages": 2})");
  const std::vector<std::string> flags = {"--steps", "1", "--lr", "0", "--eval-samples", "21"};
  ASSERT_EQ(run_program(run("whole", whole, "1", flags)).exit_code, 0);
  std::filesystem::copy(folder_ / "whole", folder_ / "staged", std::filesystem::copy_options::recursive);
  auto more = flags;
  more.push_back("--resume");
  const auto done = run_program(run("staged", staged, "4", more));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const auto validation = [&](const std::string& out) {
    std::istringstream lines(contents_of(folder_ / (out + "/metrics.jsonl")));
    double loss = 0;
    for (std::string line; std::getline(lines, line);)
      if (const Json json = Json::parse(line); json.value("event", "") == "validation") loss = json["loss"];
    return loss;
  };
  EXPECT_NEAR(validation("staged"), validation("whole"), 1e-6);
}

TEST_F(TrainStages, AreRefusedBeforeAnythingIsWritten) {
  expect_refusal(config("three", R"("pipeline": {"stages": 2})"), "3", "`pipeline.stages` = 2 must divide the 3 ranks");
  expect_refusal(config("method", R"("pipeline": {"stages": 2, "partition": "layers"})"), "2",
                 R"(`pipeline.partition` is "layers"; expected "best", "parameters", "uniform" or "type:REGEX")");
  expect_refusal(config("chunks", R"("pipeline": {"stages": 2}, "trireme": {"pipeline": {"schedule": "zb-v"}})"), "2",
                 "schedule 'zb-v' has 2 chunks on each stage, and chunks=1; set it to 2");
}

TEST_F(TrainStages, NameTheStageThatWasKilled) {
  // A step of 128 micro-batches, so that a stage's work is nearly all of its time.
  const auto two = folder_.write("two.json", R"({"train_batch_size": 256, "train_micro_batch_size_per_gpu": 2,
      "pipeline": {"stages": 2}})");
  const auto text_of_death = [&](const std::string& name) {
    Program program(run(name, two, "2", {"--steps", "100000"}));
    EXPECT_TRUE(becomes_true([&] { return losses_of(name).size() >= 3; })) << program.err();
    std::istringstream children(
        contents_of("/proc/" + std::to_string(program.pid()) + "/task/" + std::to_string(program.pid()) + "/children"));
    pid_t last = 0;
    for (pid_t child = 0; children >> child;) last = child;
    EXPECT_GT(last, 0);
    if (last > 0) kill(last, SIGKILL);
    const auto done = program.wait();
    EXPECT_EQ(done.exit_code, 137);
    EXPECT_NE(done.err.find("rank 1 was killed by SIGKILL"), std::string::npos) << done.err;
    return done.err;
  };
  // A kill may fall between two windows, where no micro-batch runs.
  const std::regex place("of stage 0, [A-Za-z]+, micro-batch [0-9]+");
  std::string texts;
  for (int attempt = 0; attempt < 5 && !std::regex_search(texts, place); ++attempt)
    texts += text_of_death(str("killed", attempt));
  EXPECT_TRUE(std::regex_search(texts, place)) << texts;
}

}  // namespace
}  // namespace trireme::cli
