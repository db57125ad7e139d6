// Runs with a tokenizer: what the run keeps of it, and who asks for it.
#include <gtest/gtest.h>

#include "tests/cli/train_runs.h"

namespace trireme::cli {
namespace {

// Bytes that may stand in the story as tokens of their own, and one rule.
std::string tokenizer_of(const std::string& merged) {
  Json vocabulary = Json::object();
  for (const std::string letter : {"l", "i", "n", "e", "o", "f", "t", "h", "s", "r", "y", "0",
                                   "1", "2", "3", "4", "5", "6", "7", "8", "9", "Ġ", "Ċ", "<end>"})
    vocabulary[letter] = vocabulary.size();
  vocabulary[merged] = vocabulary.size();
  const Json merges = Json::array({Json::array({merged.substr(0, 1), merged.substr(1)})});
  return Json{{"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", merges}}},
              {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
              {"decoder", {{"type", "ByteLevel"}}}}
      .dump();
}

class TokenizerRuns : public TrainProgram {
 protected:
  TokenizerRuns() { tokenizer_ = folder_.write("tokenizer.json", tokenizer_of("li")); }

  std::vector<std::string> start(const std::vector<std::string>& more = {}) const {
    auto arguments =
        with(train("run", {"--tokenizer", tokenizer_, "--eos-token", "<end>", "--steps", "3"}), "--model", "llama-3m");
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  void expect_refused(const std::vector<std::string>& arguments, const std::string& text) const {
    const auto done = run_program(arguments);
    EXPECT_EQ(done.exit_code, 2) << done.err;
    EXPECT_NE(done.err.find(text), std::string::npos) << done.err;
  }

  std::string tokenizer_;
};

TEST_F(TokenizerRuns, ResumeAndGenerateByTheCopyInTheRun) {
  const auto done = run_program(start());
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(contents_of(folder_ / "run/tokenizer/tokenizer.json"), contents_of(tokenizer_));
  // A built-in model has the tokenizer's vocabulary: 25 rows of 256, in the manifest's shapes.
  EXPECT_EQ(saved_weights("run").at("model.embed_tokens.weight").size(0), 25);
  std::filesystem::remove(tokenizer_);
  const auto resumed = run_program({"train", "--resume", "--out", folder_ / "run", "--steps", "4", "--ranks", "1"});
  ASSERT_EQ(resumed.exit_code, 0) << resumed.err;
  EXPECT_EQ(numbers_of("run", "loss").size(), 4u);

  const std::vector<std::string> generate = {"generate", folder_ / "run", "--prompt", "line 1", "--tokens", "5"};
  const auto text = run_program(generate);
  ASSERT_EQ(text.exit_code, 0) << text.err;
  EXPECT_TRUE(text.out.starts_with("line 1")) << text.out;

  // The tokenizer that the flag belongs to is the run's.
  expect_refused({"train", "--resume", "--out", folder_ / "run", "--eos-token", "li"},
                 "--eos-token li: the run in " + (folder_ / "run") + " was started with --eos-token <end>");
  tokenizer_ = folder_.write("other.json", tokenizer_of("ne"));
  expect_refused(start({"--resume"}), "was trained with another tokenizer; leave the flag out");
  const auto copy = folder_ / "run/tokenizer/tokenizer.json";
  const std::string whole = contents_of(copy);
  folder_.write("run/tokenizer/tokenizer.json", tokenizer_of("ne"));
  expect_refused({"train", "--resume", "--out", folder_ / "run"}, "so the copy has changed; name the one it was by");
  folder_.write("run/tokenizer/tokenizer.json", whole);
  auto other = generate;
  other.insert(other.end(), {"--tokenizer", tokenizer_});
  expect_refused(other, "this model was trained with another one; name that");
  std::filesystem::remove_all(folder_ / "run/tokenizer");
  expect_refused(generate, "the tokenizer of this model is not in");
}

TEST_F(TokenizerRuns, RefuseWhatDoesNotFit) {
  auto arguments = start();
  arguments.erase(std::find(arguments.begin(), arguments.end(), "--eos-token"),
                  std::next(std::find(arguments.begin(), arguments.end(), "--eos-token"), 2));
  expect_refused(with(arguments, "--steps", "3"), "say which token ends a document, by --eos-token TEXT");
  const auto tiny =
      folder_.write("small.json",
                    R"({"model_type": "llama", "vocab_size": 24, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": true})");
  expect_refused(with(start(), "--model", tiny), "its vocabulary of 24 is smaller than the data's, 25");
  expect_refused(with(start(), "--tokenizer", folder_ / "nowhere"), "; give a tokenizer.json of Hugging Face's form");
  for (const std::string flag : {"--tokenizer", "--init-from", "--config"})  // a shell's variable that is not set
    expect_refused(start({flag, ""}), flag + ": '' is no path; give one, or leave the flag out");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "run"));
  expect_refused(train("bytes", {"--eos-token", "<end>"}), "--eos-token <end>: without --tokenizer a byte is a token");
  ASSERT_EQ(run_program(train("bytes", {"--steps", "1"})).exit_code, 0);
  expect_refused({"generate", folder_ / "bytes", "--tokenizer", tokenizer_}, "this model was trained without one");
}

}  // namespace
}  // namespace trireme::cli
