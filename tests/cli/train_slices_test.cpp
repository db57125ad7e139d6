// `trireme train` on ranks that share layers.
#include <gtest/gtest.h>

#include "tests/cli/train_runs.h"

namespace trireme::cli {
namespace {

class TrainSlices : public TrainProgram {
 protected:
  TrainSlices() {
    model_ = folder_.write("grouped.json", R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 32,
        "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "tie_word_embeddings": true})");
  }

  /// A configuration of steps of eight samples, in which `tensor` ranks share layers.
  std::string config(int tensor, int stage, bool shards_tokens = false) const {
    return folder_.write(str("tensor", tensor, "stage", stage, shards_tokens ? "tokens" : "", ".json"),
                         str(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}, "zero_optimization": {"stage": )",
                             stage, R"(}, "tensor_parallel": {"autotp_size": )", tensor, R"(, "sequence_parallel": )",
                             shards_tokens ? "true" : "false", "}}"));
  }

  std::vector<std::string> run(const std::string& out, const std::string& config, const std::string& ranks,
                               const std::vector<std::string>& more = {}) const {
    auto words =
        with(train(out, {"--steps", "6", "--save-every", "3", "--keep", "0", "--config", config}), "--ranks", ranks);
    const auto batch = std::find(words.begin(), words.end(), "--batch");
    words.erase(batch, std::next(batch, 2));
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  void expect_losses(const std::string& out, const std::vector<double>& expected) const {
    const auto losses = numbers_of(out, "loss");
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t step = 0; step < expected.size(); ++step) EXPECT_NEAR(losses[step], expected[step], 1e-5) << step;
  }

  double validation_loss(const ProgramResult& done) const { return std::stod(done.last_line().substr(16)); }
};

// Each data-parallel rank gets its own samples, and the ranks of a layer the same ones.
TEST_F(TrainSlices, TrainAndGoOnAsWholeModelsDo) {
  const auto whole = run_program(run("whole", config(1, 0), "1"));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const auto expected = numbers_of("whole", "loss");
  ASSERT_EQ(expected.size(), 6u);
  for (const auto& [out, tensor, stage, ranks] :
       {std::tuple{"two", 2, 3, "2"}, {"four", 4, 1, "4"}, {"both", 2, 3, "4"}}) {
    SCOPED_TRACE(out);
    const auto done = run_program(run(out, config(tensor, stage), ranks));
    ASSERT_EQ(done.exit_code, 0) << done.err;
    EXPECT_NE(done.err.find(str("layers cut over ", tensor, " ranks on ", ranks, " ranks")), std::string::npos)
        << done.err;
    expect_losses(out, expected);
    EXPECT_NEAR(validation_loss(done), validation_loss(whole), 2e-4);
  }
  const auto tokens = run_program(run("tokens", config(2, 3, /*shards_tokens=*/true), "2"));
  ASSERT_EQ(tokens.exit_code, 0) << tokens.err;
  expect_losses("tokens", expected);
  EXPECT_NEAR(validation_loss(tokens), validation_loss(whole), 2e-4);
  // Whole, and over more ranks, from where two ranks that shared layers were.
  for (const auto& [out, tensor, ranks] : {std::tuple{"whole again", 1, "2"}, {"more", 4, "4"}}) {
    SCOPED_TRACE(out);
    cut("two", out, 3);
    const auto done = run_program(run(out, config(tensor, 3), ranks, {"--resume"}));
    ASSERT_EQ(done.exit_code, 0) << done.err;
    EXPECT_NE(done.err.find("continues after step 3"), std::string::npos) << done.err;
    expect_losses(out, expected);
    EXPECT_NEAR(validation_loss(done), validation_loss(whole), 2e-4);
  }
  // A validation right behind the load is that of the run that saved.
  const auto done = run_program({"train", "--resume", "--out", folder_ / "two"});
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_NE(done.err.find("nothing is left to train"), std::string::npos) << done.err;
  EXPECT_NEAR(validation_loss(done), validation_loss(whole), 2e-4);
  EXPECT_EQ(saved_weights("more").size(), saved_weights("whole").size());
}

// Parts of sequences beside slices of layers; a Gpt has queries, keys and values in one matrix.
TEST_F(TrainSlices, OnPartsOfSequencesTrainAsWholeModelsDo) {
  const std::string gpt =
      folder_.write("model_of_gpt.json", R"({"model_type": "gpt2", "vocab_size": 256, "n_positions": 32,
      "n_embd": 32, "n_layer": 2, "n_head": 4})");
  const auto config_of = [&](const std::string& name, const std::string& keys) {
    return folder_.write(name + ".json", str(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}}, "zero_optimization": {"stage": 3})",
                                             keys, "}"));
  };
  const std::string both = R"(, "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2)";
  for (const std::string& model : {model_, gpt}) {
    SCOPED_TRACE(model);
    const std::string of = model == gpt ? "gpt" : "llama";
    const auto whole = run_program(with(run(of, config_of(of, ""), "1"), "--model", model));
    ASSERT_EQ(whole.exit_code, 0) << whole.err;
    const auto expected = numbers_of(of, "loss");
    for (const auto& [name, keys, ranks] :
         {std::tuple{"Ulysses", both, "4"}, {"ring", both + R"(, "trireme": {"sequence_attention": "ring"})", "4"}}) {
      SCOPED_TRACE(name);
      const auto done = run_program(with(run(of + name, config_of(of + name, keys), ranks), "--model", model));
      ASSERT_EQ(done.exit_code, 0) << done.err;
      EXPECT_NE(done.err.find("sequences cut over 2 ranks, layers cut over 2 ranks"), std::string::npos) << done.err;
      expect_losses(of + name, expected);
      EXPECT_NEAR(validation_loss(done), validation_loss(whole), 2e-4);
    }
  }
}

// Stages draw other weights than a model without, so those of slices are compared with those of whole layers.
TEST_F(TrainSlices, OnSomeTokensInStagesTrainAsStagesOfWholeLayersDo) {
  const auto config_of = [&](const std::string& name, const std::string& keys) {
    return folder_.write(name + ".json", str(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.003}}, "zero_optimization": {"stage": 1},
        "pipeline": {"stages": 2})",
                                             keys, "}"));
  };
  const std::string tokens = R"(, "tensor_parallel": {"autotp_size": 2, "sequence_parallel": true})";
  const auto whole = run_program(run("stages", config_of("stages", ""), "2"));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  const auto done = run_program(run("tokens", config_of("tokens", tokens), "4"));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  expect_losses("tokens", numbers_of("stages", "loss"));
  EXPECT_NEAR(validation_loss(done), validation_loss(whole), 2e-4);
  // A Gpt's layers read sizes of activations.
  const std::string gpt =
      folder_.write("gpt_in_stages.json", R"({"model_type": "gpt2", "vocab_size": 256, "n_positions": 32,
      "n_embd": 32, "n_layer": 2, "n_head": 4})");
  const auto refused = run_program(with(run("gpt", config_of("gpt", tokens), "4"), "--model", gpt));
  EXPECT_EQ(refused.exit_code, 2) << refused.err;
  EXPECT_NE(refused.err.find("tensor_parallel.sequence_parallel: a stage hands on some tokens of each rank"),
            std::string::npos)
      << refused.err;
}

// A table of one step alone: four micro-batches of two samples of 32 tokens.
TEST_F(TrainSlices, TellWhatTheirFirstStepSends) {
  const auto done = run_program(run("told", config(2, 1), "2", {"--exchanges"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  const int64_t bytes = 4 * 2 * 32 * 32 * 4;  // micro-batches, samples, tokens, hidden size, fp32
  const std::string line = str("  ", bytes, "          4  sum     tensor    aten::linear of ");
  for (const char* layer :
       {"model.layers.0.self_attn.o_proj.weight\" in forward", "model.layers.1.mlp.gate_proj.weight\" in backward"})
    EXPECT_NE(done.err.find(str(line, "\"", layer)), std::string::npos) << done.err;
  const size_t table = done.err.find("bytes sent  exchanges");
  ASSERT_NE(table, std::string::npos) << done.err;
  EXPECT_EQ(done.err.find("bytes sent  exchanges", table + 1), std::string::npos) << done.err;
  const auto untold = run_program(run("untold", config(2, 1), "2"));
  EXPECT_EQ(untold.err.find("bytes sent"), std::string::npos) << untold.err;
  const auto whole = run_program(run("whole and told", config(1, 1), "2", {"--exchanges"}));
  EXPECT_NE(whole.err.find("no exchanges along \"sequence\" or \"tensor\""), std::string::npos) << whole.err;
}

TEST_F(TrainSlices, SampleAsWholeModelsDo) {
  auto words = [&](const std::string& out, int tensor, const std::string& ranks) {
    return with(run(out, config(tensor, 3), ranks, {"--lr", "0", "--prompt", "line"}), "--steps", "1");
  };
  const auto whole = run_program(words("whole", 1, "1")), cut = run_program(words("cut", 2, "2"));
  ASSERT_EQ(whole.exit_code, 0) << whole.err;
  ASSERT_EQ(cut.exit_code, 0) << cut.err;
  EXPECT_NE(whole.out.find("sample:"), std::string::npos) << whole.out;
  EXPECT_EQ(cut.out, whole.out);
}

TEST_F(TrainSlices, AreRefusedBeforeAnythingIsWritten) {
  const auto done = run_program(run("refused", config(8, 3), "8"));
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_NE(done.err.find("heads"), std::string::npos) << done.err;
  EXPECT_EQ(done.err.find("[rank"), std::string::npos) << done.err;
  EXPECT_FALSE(std::filesystem::exists(folder_ / "refused/metrics.jsonl"));
}

}  // namespace
}  // namespace trireme::cli
