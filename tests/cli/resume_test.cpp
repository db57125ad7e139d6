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

TEST_F(TrainProgramResume, LeavesTheFolderAsItIsWhenItRefuses) {
  ASSERT_EQ(run_program(train("run", {"--steps", "2"})).exit_code, 0);
  const auto config = contents_of(folder_ / "run/resolved_config.json");
  const auto metrics = contents_of(folder_ / "run/metrics.jsonl");
  const auto other_data = folder_.write("other/story.txt", std::string(50000, 'x'));
  // Other --steps would show in the schedule that resolved_config.json spells out.
  const auto resumed = train("run", {"--steps", "9", "--resume"});
  for (const auto& [flag, value] :
       std::map<std::string, std::string>{{"--seq", "16"}, {"--seed", "6"}, {"--data", other_data}}) {
    const auto done = run_program(with(resumed, flag, value));
    EXPECT_EQ(done.exit_code, 2) << flag << done.err;
    EXPECT_EQ(contents_of(folder_ / "run/resolved_config.json"), config) << flag;
    EXPECT_EQ(contents_of(folder_ / "run/metrics.jsonl"), metrics) << flag;
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
