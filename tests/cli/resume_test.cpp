// `trireme train --resume` with something that has changed since the checkpoint.
#include "tests/cli/train_runs.h"

namespace trireme::cli {
namespace {

class TrainProgramResume : public TrainProgram {};

TEST_F(TrainProgramResume, ContinuesOnAnotherNumberOfRanks) {
  for (const std::string ranks : {"1", "2"}) {
    const std::string others = ranks == "1" ? "2" : "1";
    const auto on = [&](const std::string& out, const std::string& number, const std::vector<std::string>& more) {
      // Four samples per step in any case.
      return with(with(train(out + ranks, more), "--ranks", number), "--batch", number == "1" ? "4" : "2");
    };
    const auto whole = run_program(on("whole", ranks, {"--steps", "8", "--save-every", "4", "--keep", "0"}));
    ASSERT_EQ(whole.exit_code, 0) << whole.err;
    cut("whole" + ranks, "cut" + ranks, 4);
    cut("whole" + ranks, "still" + ranks, 4);

    const auto still = run_program(on("still", others, {"--steps", "5", "--lr", "0", "--resume"}));
    ASSERT_EQ(still.exit_code, 0) << still.err;
    expect_same_weights(saved_weights("still" + ranks), saved_weights("cut" + ranks));

    const auto resumed = run_program(on("cut", others, {"--steps", "8", "--resume"}));
    ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
    const auto expected = numbers_of("whole" + ranks, "loss"), losses = numbers_of("cut" + ranks, "loss");
    ASSERT_EQ(losses.size(), 8u);
    // The same samples, summed in another order in fp32; what rounding adds grows over four steps.
    for (size_t i = 0; i < 8; ++i) EXPECT_NEAR(losses[i], expected[i], 1e-4) << "step " << i + 1;
  }
}

TEST_F(TrainProgramResume, NeedsTheFolderAlone) {
  const auto config = folder_.write("given.json", R"({"train_batch_size": 4, "gradient_clipping": 0.5,
      "optimizer": {"type": "AdamW", "params": {"lr": 0.003, "weight_decay": 0.1}}, "zero_optimization": {"stage": 2}})");
  auto words = train("whole", {"--steps", "8", "--save-every", "4", "--keep", "0", "--config", config, "--exclude",
                               "b*", "--exclude", "c*", "--steps", "6"});
  const auto batch = std::find(words.begin(), words.end(), "--batch");
  words.erase(batch, std::next(batch, 2));
  // Paths of the folder that the run was started in.
  const std::string inside = "cd '" + folder_.path().string() + "' && exec '" + program_path() + "' \"$@\"";
  std::vector<std::string> started = {"/bin/sh", "-c", inside, "sh"};
  words = with(with(with(words, "--data", "data"), "--config", "given.json"), "--model", "tiny.json");
  started.insert(started.end(), words.begin(), words.end());
  const auto whole = run_program(started);
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  cut("whole", "a cut one", 4);
  std::filesystem::remove(config);  // the run has its own copy

  const auto resumed = run_program({"train", "--resume", "--out", folder_ / "a cut one"});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_NE(resumed.err.find("continues after step 4"), std::string::npos) << resumed.err;
  EXPECT_EQ(losses_of("a cut one"), losses_of("whole"));
  EXPECT_EQ(weights_of("a cut one"), weights_of("whole"));
  EXPECT_EQ(resumed.last_line(), whole.last_line());

  // A flag that is given now holds for later steps, too.
  const auto longer =
      run_program({"train", "--resume", "--out", folder_ / "a cut one", "--steps", "7", "--ranks", "1"});
  ASSERT_EQ(longer.exit_code, 0) << longer.err;
  EXPECT_NE(longer.err.find("ZeRO stage 2 on 1 rank"), std::string::npos) << longer.err;
  const auto again = run_program({"train", "--resume", "--out", folder_ / "a cut one"});
  EXPECT_NE(again.err.find("7 steps are done, --steps is 7"), std::string::npos) << again.err;
  EXPECT_NE(again.err.find("ZeRO stage 2 on 1 rank"), std::string::npos) << again.err;
}

TEST_F(TrainProgramResume, LeavesTheFolderAsItIsWhenItRefuses) {
  ASSERT_EQ(run_program(train("run", {"--steps", "2"})).exit_code, 0);
  const auto config = contents_of(folder_ / "run/resolved_config.json");
  const auto metrics = contents_of(folder_ / "run/metrics.jsonl"), record = contents_of(folder_ / "run/run.json");
  const auto other_data = folder_.write("other/story.txt", std::string(50000, 'x'));
  // Other --steps would show in the schedule that resolved_config.json spells out.
  const auto resumed = train("run", {"--steps", "9", "--resume"});
  for (const auto& [flag, value] :
       std::map<std::string, std::string>{{"--seq", "16"}, {"--seed", "6"}, {"--data", other_data}}) {
    const auto done = run_program(with(resumed, flag, value));
    EXPECT_EQ(done.exit_code, 2) << flag << done.err;
    EXPECT_EQ(contents_of(folder_ / "run/resolved_config.json"), config) << flag;
    EXPECT_EQ(contents_of(folder_ / "run/metrics.jsonl"), metrics) << flag;
    EXPECT_EQ(contents_of(folder_ / "run/run.json"), record) << flag;
  }
  ASSERT_EQ(run_program(resumed).exit_code, 0);
  EXPECT_NE(contents_of(folder_ / "run/resolved_config.json"), config);
}

TEST_F(TrainProgramResume, FromADamagedCheckpointNamesTheOthersAndTakesOneByItsTag) {
  ASSERT_EQ(run_program(train("run", {"--steps", "6", "--save-every", "3", "--keep", "0"})).exit_code, 0);
  const std::string shard = folder_ / "run/checkpoints/global_step6/shard-00001-of-00002.safetensors";
  std::string bytes = contents_of(shard);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  folder_.write("run/checkpoints/global_step6/shard-00001-of-00002.safetensors", bytes);

  const auto refused = run_program(train("run", {"--steps", "8", "--resume"}));
  EXPECT_EQ(refused.exit_code, 1);
  EXPECT_NE(refused.err.find("are damaged: checksum"), std::string::npos) << refused.err;
  EXPECT_NE(refused.err.find("--resume --tag TAG continues from one of global_step3, global_step6"), std::string::npos)
      << refused.err;
  const auto absent = run_program(train("run", {"--steps", "8", "--resume", "--tag", "global_step5"}));
  EXPECT_EQ(absent.exit_code, 2);
  EXPECT_NE(absent.err.find("--tag global_step5: "), std::string::npos) << absent.err;
  EXPECT_NE(absent.err.find("has no checkpoint of this name; --resume --tag TAG continues from one of global_step3"),
            std::string::npos)
      << absent.err;
  const auto resumed = run_program(train("run", {"--steps", "8", "--resume", "--tag", "global_step3"}));
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(numbers_of("run", "loss").size(), 8u);
}

TEST_F(TrainProgramResume, TakesTheLearningRateOfTheFlag) {
  const auto plain = folder_.write("plain.json", R"({"optimizer": {"type": "SGD", "params": {"lr": 0.25}}})");
  const auto decaying = folder_.write("decaying.json", R"({"optimizer": {"type": "SGD", "params": {"lr": 0.25}},
      "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "total_num_steps": 1000000000}}})");
  for (const auto& config : {plain, decaying}) {
    const std::string out = config == plain ? "plain" : "decaying";
    ASSERT_EQ(run_program(train(out, {"--steps", "3", "--config", config})).exit_code, 0);
    const auto done = run_program(train(out, {"--steps", "5", "--config", config, "--resume", "--lr", "0.125"}));
    ASSERT_EQ(done.exit_code, 0) << done.err;
    const auto rates = numbers_of(out, "lr");
    ASSERT_EQ(rates.size(), 5u);
    EXPECT_NEAR(rates[3], 0.125, 1e-6) << out;
    EXPECT_NEAR(rates[4], 0.125, 1e-6) << out;
  }
  EXPECT_EQ(numbers_of("plain", "lr")[2], 0.25);
}

}  // namespace
}  // namespace trireme::cli
