#include "cli/train_setup.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "cli/run_lock.h"
#include "tests/cli/error_text.h"
#include "tests/cli/program.h"

namespace trireme::cli {
namespace {

Json completed(const char* config, const TrainOptions& options = {}) {
  return complete_config(Json::parse(config), options, "file");
}

TEST(CompleteConfig, FillsInABatchSizeAndAnOptimizerWhereNoneIsGiven) {
  const auto config = completed("{}");
  EXPECT_EQ(config["train_micro_batch_size_per_gpu"], 8);
  EXPECT_EQ(config["optimizer"]["type"], "AdamW");
  EXPECT_EQ(config["optimizer"]["params"]["lr"], 1e-3);
}

TEST(CompleteConfig, TakesFlagsWhereTheFileSaysAuto) {
  TrainOptions options;
  options.batch = 3;
  options.lr = 0.5;
  options.steps = 400;
  const auto config =
      completed(R"({"train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "SGD", "params": {"lr": "auto"}},
                                    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}}})",
                options);
  EXPECT_EQ(config["train_micro_batch_size_per_gpu"], 3);
  EXPECT_EQ(config["optimizer"], (Json{{"type", "SGD"}, {"params", {{"lr", 0.5}}}}));
  EXPECT_EQ(config["scheduler"]["params"],
            (Json{{"total_num_steps", 400}, {"warmup_num_steps", 20}, {"warmup_max_lr", 0.5}}));
}

TEST(CompleteConfig, LeavesWhatTheFileSays) {
  const char* text = R"({"train_batch_size": 6, "optimizer": {"type": "AdamW", "params": {"lr": 0.25}},
                         "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 7}}})";
  EXPECT_EQ(completed(text), Json::parse(text));
}

TEST(CompleteConfig, PutsTheFlagsLearningRateAboveTheFiles) {
  TrainOptions options;
  options.lr = 0.5;
  EXPECT_EQ(
      completed(R"({"optimizer": {"type": "AdamW", "params": {"lr": 0.25}}})", options)["optimizer"]["params"]["lr"],
      0.5);
}

// These two peak at a rate of their own; the cosine's is the optimizer's.
TEST(CompleteConfig, PutsTheFlagsLearningRateAboveThatOfAWarmUp) {
  TrainOptions options;
  options.lr = 0.5;
  const auto peak = [&](const std::string& scheduler) {
    const auto config =
        completed((R"({"optimizer": {"type": "AdamW"}, "scheduler": )" + scheduler + "}").c_str(), options);
    return config_from_json(config, 1, {}, "file").scheduler->warmup_max_lr;
  };
  EXPECT_EQ(peak(R"({"type": "WarmupDecayLR", "params": {"total_num_steps": 9}})"), 0.5);
  EXPECT_EQ(peak(R"({"type": "warmuplr", "params": {"warmup_max_lr": 0.25}})"), 0.5);
  EXPECT_EQ(peak(R"({"type": "WarmupDecayLR", "params": {"warmup_max_lr": "auto", "total_num_steps": 9}})"), 0.5);
  EXPECT_EQ(peak(R"({"type": "WarmupLR"})"), LrScheduleOptions::kOptimizerLr);
  EXPECT_EQ(peak(R"({"type": "WarmupCosineLR", "params": {"total_num_steps": 9}})"), LrScheduleOptions::kOptimizerLr);
}

TEST(CompleteConfig, RefusesABatchSizeThatIsGivenTwice) {
  TrainOptions options;
  options.batch = 2;
  const auto refusal = [&] { completed(R"({"train_micro_batch_size_per_gpu": 4})", options); };
  EXPECT_EQ(error_text(refusal), "--batch: file already says train_micro_batch_size_per_gpu=4; leave one out");
}

// choose_output() looks at runs/ of the current folder.
class ChooseOutput : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::current_path(folder_.path()); }
  void TearDown() override { std::filesystem::current_path(before_); }
  TemporaryFolder folder_;
  std::filesystem::path before_ = std::filesystem::current_path();
};

TEST_F(ChooseOutput, TakesTheNextFreeNameAndResumesTheLast) {
  TrainOptions fresh;
  TrainOptions resumed;
  resumed.resume = true;
  EXPECT_EQ(choose_output(fresh, "m"), "runs/m");
  EXPECT_EQ(choose_output(resumed, "m"), "runs/m");
  folder_.write("runs/m/metrics.jsonl", "");
  EXPECT_EQ(choose_output(fresh, "m"), "runs/m-2");
  EXPECT_EQ(choose_output(resumed, "m"), "runs/m");
  folder_.write("runs/m-2/metrics.jsonl", "");
  EXPECT_EQ(choose_output(fresh, "m"), "runs/m-3");
  EXPECT_EQ(choose_output(resumed, "m"), "runs/m-2");
}

TEST_F(ChooseOutput, TakesAFolderForTakenThatARunHasOnlyJustBegunToUse) {
  {
    const RunLock begun("runs/m");
    EXPECT_TRUE(is_locked("runs/m"));
    EXPECT_EQ(choose_output({}, "m"), "runs/m-2");
    EXPECT_EQ(error_text([] { const RunLock second("runs/m"); }),
              "--out runs/m: another run writes there; wait until it has ended, or choose another folder");
  }
  EXPECT_FALSE(is_locked("runs/m"));
  EXPECT_EQ(choose_output({}, "m"), "runs/m");
}

TEST_F(ChooseOutput, GivesRunsThatChoseTheSameFolderTheNextFreeOne) {
  const auto chosen = [] {
    return TrainSetup{.options = {}, .name = "m", .config = {}, .model = {}, .data = {}, .out = choose_output({}, "m")};
  };
  TrainSetup first = chosen(), second = chosen(), third = chosen();
  EXPECT_EQ(second.out, "runs/m");
  const RunLock of_first = take_output(first);
  {
    const RunLock of_second = take_output(second);
    EXPECT_EQ(second.out, "runs/m-2");
    folder_.write("runs/m-2/metrics.jsonl", "");
  }
  third.out = "runs/m-2";  // chosen before the second run, which is over by now
  const RunLock of_third = take_output(third);
  EXPECT_EQ(first.out, "runs/m");
  EXPECT_EQ(third.out, "runs/m-3");
}

TEST_F(ChooseOutput, RefusesToOverwriteARun) {
  TrainOptions options;
  options.out = "here";
  EXPECT_EQ(choose_output(options, "m"), "here");
  folder_.write("here/metrics.jsonl", "");
  EXPECT_EQ(error_text([&] { choose_output(options, "m"); }),
            "--out here: there is a run in this folder; continue it with --resume, or choose another folder");
  options.resume = true;
  EXPECT_EQ(choose_output(options, "m"), "here");
}

TEST(PrepareTraining, ReadsConfigurationModelAndData) {
  const TemporaryFolder folder;
  folder.write("data/a.txt", std::string(30000, 'a'));
  TrainOptions options;
  options.data = folder / "data/a.txt";
  options.seq = 32;
  options.out = folder / "out";
  const auto setup = prepare_training(options, 2);
  EXPECT_EQ(setup.name, "llama-3m");
  EXPECT_EQ(setup.config.pager.stage, 3);
  EXPECT_EQ(setup.config.batch.train_batch_size, 16);
  EXPECT_EQ(setup.config.scheduler->total_num_steps, 500);
  EXPECT_EQ(setup.data.train.seq(), 32);
  EXPECT_GT(setup.data.held_out.size(), 0);
  EXPECT_EQ(vocab_size(setup.model), 256);
  EXPECT_FALSE(std::filesystem::exists(setup.out));
}

// A vocabulary beyond the bytes is room that the data leaves unused. Nothing of the model is made here.
TEST(PrepareTraining, TakesBytesForAModelWithTheVocabularyOfATokenizer) {
  const TemporaryFolder folder;
  TrainOptions options;
  options.model = "llama-1b";
  options.data = folder.write("a.txt", std::string(30000, 'a'));
  options.out = folder / "out";
  const auto setup = prepare_training(options, 1);
  EXPECT_EQ(setup.name, "llama-1b");
  EXPECT_EQ(vocab_size(setup.model), 128256);
  EXPECT_EQ(setup.data.vocab_size, 256);
}

}  // namespace
}  // namespace trireme::cli
