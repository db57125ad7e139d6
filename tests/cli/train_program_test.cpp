// `trireme train` end to end, on a tiny model.
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <regex>
#include <sstream>
#include <thread>

#include "tests/cli/train_runs.h"
#include "tests/support/becomes_true.h"
#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

using trireme::testing::becomes_true;

// Ranks are the supervisor's children, the last ones of them.
std::vector<pid_t> children_of(pid_t parent) {
  std::istringstream text(
      contents_of("/proc/" + std::to_string(parent) + "/task/" + std::to_string(parent) + "/children"));
  std::vector<pid_t> children;
  for (pid_t child = 0; text >> child;) children.push_back(child);
  if (children.empty()) throw std::runtime_error("no children");
  return children;
}

TEST_F(TrainProgram, TrainsOnTwoRanksAndEndsWithTheValidationLoss) {
  const auto done = run_program(train("run", {"--steps", "20"}));
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_TRUE(std::regex_match(done.last_line(), std::regex("validation loss [0-9]+\\.[0-9]{4}"))) << done.out;
  EXPECT_EQ(losses_of("run").size(), 20u);
  EXPECT_NE(contents_of(folder_ / "run/report.html").find("<html"), std::string::npos);
  EXPECT_NE(contents_of(folder_ / "run/resolved_config.json").find("\"stage\": 3"), std::string::npos);
}

TEST_F(TrainProgram, SaysNothingButTheResultWhereItIsToBeQuiet) {
  const auto config = folder_.write("notes.json", R"({"steps_per_print": 1, "zero_allow_untested_optimizer": true})");
  for (const std::string ranks : {"1", "2"}) {
    const auto words =
        with(train("quiet" + ranks, {"--steps", "4", "--save-every", "2", "--config", config}), "--ranks", ranks);
    auto quiet = words;
    quiet.push_back("--quiet");
    const auto done = run_program(quiet);
    EXPECT_EQ(done.exit_code, 0) << done.err;
    EXPECT_EQ(done.err, "");
    EXPECT_TRUE(std::regex_match(done.out, std::regex("validation loss [0-9]+\\.[0-9]{4}\n"))) << done.out;
    EXPECT_EQ(losses_of("quiet" + ranks).size(), 4u);
    // It is not kept for a run that goes on.
    EXPECT_NE(run_program({"train", "--resume", "--out", folder_ / ("quiet" + ranks)}).err.find("nothing is left"),
              std::string::npos);
  }
  const auto refused = run_program(train("quiet2", {"--steps", "4", "--quiet"}));
  EXPECT_NE(refused.err.find("there is a run in this folder"), std::string::npos) << refused.err;
  Program program(train("stopped", {"--steps", "100000", "--quiet"}));
  ASSERT_TRUE(becomes_true([&] { return losses_of("stopped").size() >= 3; })) << program.err();
  program.signal(SIGINT);
  const auto stopped = program.wait();
  EXPECT_EQ(stopped.exit_code, 130);
  EXPECT_TRUE(std::regex_match(stopped.err, std::regex("interrupted after step [0-9]+; continue with\n[^\n]*\n")))
      << stopped.err;
}

TEST_F(TrainProgram, ContinuesBitForBitWhereItWasSaved) {
  ASSERT_EQ(run_program(train("whole", {"--steps", "12", "--save-every", "6", "--keep", "0"})).exit_code, 0);
  cut("whole", "cut", 6);
  const auto resumed = run_program(train("cut", {"--steps", "12", "--resume"}));
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(losses_of("cut"), losses_of("whole"));
  EXPECT_EQ(weights_of("cut"), weights_of("whole"));
  EXPECT_FALSE(weights_of("cut").empty());
}

TEST_F(TrainProgram, SavesTheSameFilesInTheBackgroundAndRecordsThemUnderTheirSteps) {
  for (const std::string async : {"false", "true"}) {
    const auto config = folder_.write(async + ".json", R"({"optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "checkpoint": {"keep_last": 2, "async_save": )" + async +
                                                           "}}");
    const auto done = run_program(train(async, {"--steps", "9", "--save-every", "3", "--config", config}));
    ASSERT_EQ(done.exit_code, 0) << done.err;
    std::string saved;
    for (const char* step : {"3", "6", "9"}) {
      const auto at = done.err.find(str("step ", step, ": saved "));
      EXPECT_NE(at, std::string::npos) << done.err;
      saved += str(at != std::string::npos ? step : "", " ");
    }
    EXPECT_EQ(saved, "3 6 9 ");
    EXPECT_FALSE(std::filesystem::exists(folder_ / (async + "/checkpoints/global_step3"))) << "keep_last is 2";
  }
  for (const char* file :
       {"global_step6/shard-00000-of-00002.safetensors", "global_step9/shard-00001-of-00002.safetensors"})
    EXPECT_EQ(contents_of(folder_ / (std::string("true/checkpoints/") + file)),
              contents_of(folder_ / (std::string("false/checkpoints/") + file)))
        << file;
}

TEST_F(TrainProgram, ResumesFromNothingOnlyWhereItIsToldTo) {
  for (const std::string ranks : {"1", "2"}) {
    const auto refused = run_program(with(train("new" + ranks, {"--steps", "2", "--resume"}), "--ranks", ranks));
    EXPECT_EQ(refused.exit_code, 2);
    EXPECT_EQ(refused.err, "trireme train: --resume: " + (folder_ / ("new" + ranks)) +
                               " has no checkpoint to continue from; correct --out, or give --resume-if-there to "
                               "begin a run where there is none yet\n");
    EXPECT_FALSE(std::filesystem::exists(folder_ / ("new" + ranks)));
    // The flags of a script that Slurm starts again.
    for (const size_t steps : {2, 4}) {
      const auto done = run_program(
          with(train("new" + ranks, {"--steps", std::to_string(steps), "--resume-if-there"}), "--ranks", ranks));
      EXPECT_EQ(done.exit_code, 0) << done.err;
      EXPECT_EQ(done.err.find("continues after step 2") != std::string::npos, steps == 4) << done.err;
      EXPECT_EQ(losses_of("new" + ranks).size(), steps);
    }
  }
}

// A run that ended before its first checkpoint has its flags on record, with which it begins again.
TEST_F(TrainProgram, BeginsAgainWithTheFlagsOfARunWithoutACheckpoint) {
  Program program(train("early", {"--steps", "100000"}));
  ASSERT_TRUE(becomes_true([&] { return losses_of("early").size() >= 1; })) << program.err();
  program.signal(SIGKILL);
  program.wait();
  EXPECT_EQ(run_program({"train", "--resume", "--out", folder_ / "early"}).exit_code, 2);
  ASSERT_TRUE(becomes_true([&] {
    return run_program({"train", "--resume-if-there", "--steps", "2", "--out", folder_ / "early"}).exit_code == 0;
  }));
  EXPECT_EQ(losses_of("early").size(), 2u);
}

TEST_F(TrainProgram, SaysDtypesOnceInTheTableOfPrecisionWhereDetailsAreAskedFor) {
  auto command = train("run", {"--steps", "1"});
  EXPECT_EQ(run_program(command).err.find("dtypes"), std::string::npos);
  command = train("details", {"--steps", "1"});
  const auto done = run_program(command, {{"TRIREME_LOG_LEVEL", "DEBUG"}});
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const auto first = done.err.find("precision: full; dtypes, and bytes on rank 0");
  ASSERT_NE(first, std::string::npos) << done.err;
  EXPECT_EQ(done.err.find("dtypes", first + 30), std::string::npos) << done.err;
  EXPECT_NE(done.err.find(" on 2 ranks (cpu), 4 x 32 tokens per step"), std::string::npos) << done.err;
}

TEST_F(TrainProgram, SavesAndEndsCleanlyOnCtrlC) {
  Program program(train("stopped", {"--steps", "100000"}));
  ASSERT_TRUE(becomes_true([&] { return losses_of("stopped").size() >= 3; })) << program.err();
  program.signal(SIGINT);
  const auto done = program.wait();
  EXPECT_EQ(done.exit_code, 130) << done.err;
  const std::string command = program_path() + " train --resume --out " + (folder_ / "stopped");
  EXPECT_TRUE(done.err.ends_with("; continue with\n" + command + "\n")) << done.err;
  const auto steps = losses_of("stopped").size();
  EXPECT_TRUE(std::filesystem::exists(folder_ / ("stopped/checkpoints/global_step" + std::to_string(steps))));
  const auto more = run_program({"/bin/sh", "-c", command + " --steps " + std::to_string(steps + 2)});
  EXPECT_EQ(more.exit_code, 0) << more.err;
  EXPECT_EQ(losses_of("stopped").size(), steps + 2);
}

// As Slurm's --signal=USR1@60 sends it: to the launcher, to a rank alone, or to one process without ranks.
TEST_F(TrainProgram, SavesAndGoesOnAtSigusr1) {
  for (const std::string ranks : {"2", "1"}) {
    const std::string out = "saved" + ranks;
    Program program(with(train(out, {"--steps", "100000"}), "--ranks", ranks));
    const auto saves = [&] {
      const std::string said = program.err();
      size_t count = 0;
      for (size_t at = 0; (at = said.find(": saved ", at)) != std::string::npos; ++at) ++count;
      return count;
    };
    ASSERT_TRUE(becomes_true([&] { return losses_of(out).size() >= 3; })) << program.err();
    program.signal(SIGUSR1);
    ASSERT_TRUE(becomes_true([&] { return saves() == 1; })) << program.err();
    const auto steps = losses_of(out).size();
    ASSERT_TRUE(becomes_true([&] { return losses_of(out).size() > steps; })) << program.err();
    if (ranks == "2") {
      kill(children_of(program.pid()).back(), SIGUSR1);
      ASSERT_TRUE(becomes_true([&] { return saves() == 2; })) << program.err();
    }
    program.signal(SIGINT);
    const auto done = program.wait();
    EXPECT_EQ(done.exit_code, 130) << done.err;
    EXPECT_EQ(done.err.find("not passed"), std::string::npos) << done.err;
  }
}

TEST_F(TrainProgram, NamesTheRankThatWasKilled) {
  Program program(train("killed", {"--steps", "100000"}));
  ASSERT_TRUE(becomes_true([&] { return losses_of("killed").size() >= 3; })) << program.err();
  kill(children_of(program.pid()).back(), SIGKILL);
  const auto done = program.wait();
  EXPECT_EQ(done.exit_code, 137);
  EXPECT_NE(done.err.find("trireme train: rank 1 was killed by SIGKILL"), std::string::npos) << done.err;
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

TEST_F(TrainProgram, GoesOnWhenNobodyReadsItsOutput) {
  EXPECT_EQ(run_program(train("unread", {"--steps", "30"}), {}, Output::kClosedPipe).exit_code, 0);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "unread/checkpoints/global_step30"));
  const auto alone = with(train("alone", {"--steps", "30"}), "--ranks", "1");
  EXPECT_EQ(run_program(alone, {}, Output::kClosedPipe).exit_code, 0);
  EXPECT_TRUE(std::filesystem::exists(folder_ / "alone/checkpoints/global_step30"));
}

TEST_F(TrainProgram, TakesAFolderForEachOfSeveralRunsThatStartAtOnce) {
  const auto in_folder = [&](const std::string& ranks) {
    auto words = with(train("", {"--steps", "2"}), "--ranks", ranks);
    words.resize(words.size() - 4);  // without --out
    words.insert(words.end(), {"--steps", "2"});
    std::vector<std::string> shell = {"/bin/sh", "-c", "cd \"$0\" && exec \"$@\"", folder_.path().string(),
                                      program_path()};
    shell.insert(shell.end(), words.begin(), words.end());
    return shell;
  };
  std::vector<std::unique_ptr<Program>> runs;
  for (const char* ranks : {"1", "1", "1", "2"}) runs.push_back(std::make_unique<Program>(in_folder(ranks)));
  for (const auto& run : runs) {
    const auto done = run->wait();
    EXPECT_EQ(done.exit_code, 0) << done.err;
  }
  for (const char* name : {"tiny", "tiny-2", "tiny-3", "tiny-4"})
    EXPECT_EQ(losses_of("runs/" + std::string(name)).size(), 2u) << name;
}

// A batch script has SLURM_PROCID and all tasks of the job, but only srun makes a step with ranks.
TEST_F(TrainProgram, StartsItsRanksInABatchScript) {
  std::map<std::string, std::string> slurm = {{"SLURM_PROCID", "0"}, {"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "4"}};
  const auto in_script = run_program(train("script", {"--steps", "2"}), slurm);
  EXPECT_EQ(in_script.exit_code, 0) << in_script.err;
  EXPECT_NE(in_script.err.find("on 2 ranks"), std::string::npos) << in_script.err;
  slurm.insert({{"SLURM_STEP_ID", "3"}, {"SLURM_STEP_NUM_TASKS", "1"}});  // srun -n 1 --pty bash
  const auto in_shell = run_program(train("shell", {"--steps", "2"}), slurm);
  EXPECT_EQ(in_shell.exit_code, 0) << in_shell.err;
}

TEST_F(TrainProgram, TakesTokensForTokensEvenWhereTheVocabularyIsThatOfBytes) {
  std::string tokens;
  for (int i = 0; i < 20000; ++i) tokens += {static_cast<char>(i * 7919 % 251), '\0'};
  const auto done = run_program(with(train("run", {"--steps", "2"}), "--data", folder_.write("tokens.bin", tokens)));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(done.out.find("sample:"), std::string::npos) << done.out;
  const auto more = run_program({"generate", "--checkpoint", folder_ / "run", "--prompt", "12 7", "--tokens", "3"});
  EXPECT_TRUE(std::regex_match(more.out, std::regex("12 7( [0-9]+){3}\n"))) << more.out << more.err;
}

// Training and validation on parts of sequences are those on whole ones, at the same batch.
TEST_F(TrainProgram, ValidatesOnPartsOfSequences) {
  const auto config = [&](const std::string& name, int micro, int sequence) {
    return folder_.write(name + ".json", str(R"({"train_batch_size": 4, "train_micro_batch_size_per_gpu": )", micro,
                                             R"(, "sequence_parallel_size": )", sequence,
                                             R"(, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}})"));
  };
  std::string validation;
  for (const int sequence : {1, 2}) {
    auto words = train(str("of", sequence),
                       {"--steps", "3", "--config", config(str("by", sequence), sequence == 1 ? 2 : 4, sequence)});
    words.erase(std::find(words.begin(), words.end(), "--batch"), std::find(words.begin(), words.end(), "--seed"));
    const auto done = run_program(words);
    ASSERT_EQ(done.exit_code, 0) << done.err;
    if (sequence == 2) {
      EXPECT_EQ(done.last_line(), validation);
    }
    validation = done.last_line();
  }
  const auto whole = numbers_of("of1", "loss"), parts = numbers_of("of2", "loss");
  ASSERT_EQ(parts.size(), 3u);
  for (size_t i = 0; i < parts.size(); ++i) EXPECT_NEAR(parts[i], whole[i], 1e-5);
}

TEST_F(TrainProgram, TakesAFileOfAccelerateForTheSameLosses) {
  const auto yaml = folder_.write("fsdp.yaml", "distributed_type: FSDP\nmixed_precision: bf16\ngradient_clipping: 1\n");
  const auto json = folder_.write("ds.json", R"({"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}})");
  for (const auto& [out, config] : {std::pair{"fsdp", yaml}, {"ds", json}}) {
    const auto done = run_program(train(out, {"--steps", "3", "--config", config}));
    EXPECT_EQ(done.exit_code, 0) << done.err;
  }
  EXPECT_EQ(losses_of("fsdp"), losses_of("ds"));
  EXPECT_EQ(losses_of("fsdp").size(), 3u);
}

TEST_F(TrainProgram, ShowsTheLibrarysNotesOnce) {
  const auto config = folder_.write("notes.json", R"({"steps_per_print": 2, "zero_allow_untested_optimizer": true})");
  const auto done = run_program(train("run", {"--steps", "3", "--config", config}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const auto hint = done.err.find(
      "ignored, because Trireme does not need them (`trireme docs config` says why): `zero_allow_untested_optimizer`");
  ASSERT_NE(hint, std::string::npos) << done.err;
  EXPECT_EQ(done.err.find("does not need them", hint + 40), std::string::npos) << done.err;
  EXPECT_NE(done.err.find("\nstep=2, skipped=0, lr="), std::string::npos) << done.err;
}

TEST_F(TrainProgram, RecordsTheLearningRateThatAStepWasTakenWith) {
  const auto config = folder_.write("warm.json", R"({
    "optimizer": {"type": "AdamW", "params": {"lr": 0.4}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 0.4}}})");
  const auto done = run_program(train("run", {"--steps", "6", "--config", config}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const auto rates = numbers_of("run", "lr");
  ASSERT_EQ(rates.size(), 6u);
  const std::vector<double> expected = {0,   0,   0.1,
                                        0.2, 0.3, 0.4};  // as DeepSpeed, which starts its schedules at step -1
  for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(rates[i], expected[i], 1e-6) << "step " << i + 1;
}

// 6 * (2 layers of 4 * 32 * 32 + 3 * 32 * 64, and the tied head of 256 * 32) + 12 * 2 layers * 32 * --seq 32.
constexpr double kFlopsPerToken = 6 * (2 * (4 * 32 * 32 + 3 * 32 * 64) + 256 * 32) + 12 * 2 * 32 * 32;

TEST_F(TrainProgram, CountsTheWorkOfARankAndItsPartOfThePeak) {
  const auto done = run_program(train("run", {"--steps", "10", "--peak-tflops", "0.5"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const auto tokens_per_s = numbers_of("run", "tokens_per_s");
  const auto tflops = numbers_of("run", "tflops_per_rank");
  const auto mfu = numbers_of("run", "mfu");
  ASSERT_EQ(tflops.size(), 10u);
  for (size_t i = 0; i < tflops.size(); ++i) {
    EXPECT_DOUBLE_EQ(tflops[i], tokens_per_s[i] * kFlopsPerToken / 2 / 1e12) << "on 2 ranks";
    EXPECT_DOUBLE_EQ(mfu[i], tflops[i] / 0.5);
  }
  EXPECT_TRUE(std::regex_search(done.err, std::regex("step 10/10 .*FLOP/s/rank  [0-9.e-]+ % MFU  took"))) << done.err;
  EXPECT_TRUE(std::regex_search(done.err, std::regex("\npeak resident memory of the largest rank: [0-9.]+ [MG]B\n")))
      << done.err;
  EXPECT_NE(contents_of(folder_ / "run/report.html").find("of the peak (MFU)"), std::string::npos);
}

TEST_F(TrainProgram, ShowsNoPartOfAPeakThatNobodyKnows) {
  const auto done = run_program(with(train("run", {"--steps", "2"}), "--ranks", "1"));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_TRUE(std::regex_search(done.err, std::regex("step 2/2 .* tokens/s  [0-9.]+ [kMGT]FLOP/s  took"))) << done.err;
  EXPECT_EQ(done.err.find("MFU"), std::string::npos) << done.err;
  EXPECT_EQ(contents_of(folder_ / "run/metrics.jsonl").find("\"mfu\""), std::string::npos);
}

TEST_F(TrainProgram, CountsTheFilesThatItSkips) {
  folder_.write("data/empty.txt", "");
  folder_.write("data/binary.txt", std::string("a\0b", 3));
  folder_.write("data/second.txt", std::string(4000, 'x'));
  const auto done = run_program(with(train("run", {"--steps", "1"}), "--data", folder_ / "data"));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_NE(done.err.find("held out, 2 files skipped (binary or empty)\n"), std::string::npos) << done.err;
}

// The launcher of the environment that the project installs for itself, if it is there.
std::string find_torchrun() {
  for (auto folder = std::filesystem::path(program_path()); folder.has_relative_path(); folder = folder.parent_path()) {
    const auto candidate = folder.parent_path() / ".venv/bin/torchrun";
    if (std::filesystem::exists(candidate)) return candidate;
  }
  return "";
}

TEST_F(TrainProgram, IsARankOfTorchrun) {
  const auto torchrun = find_torchrun();
  if (torchrun.empty()) GTEST_SKIP() << "there is no .venv/bin/torchrun above " << program_path();
  auto words = train("run", {"--steps", "4"});
  words.erase(std::find(words.begin(), words.end(), "--ranks"), std::find(words.begin(), words.end(), "--ranks") + 2);
  words.insert(words.begin(), {torchrun, "--no-python", "--nproc_per_node", "2", program_path()});
  const auto done = run_program(words);
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_NE(done.err.find("on 2 ranks"), std::string::npos) << done.err;
  ASSERT_EQ(run_program(train("same", {"--steps", "4"})).exit_code, 0);
  EXPECT_EQ(weights_of("run"), weights_of("same"));
}

}  // namespace
}  // namespace trireme::cli
