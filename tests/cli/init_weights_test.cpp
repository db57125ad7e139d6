// First weights from a file.
#include "cli/init_weights.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include "tests/cli/error_text.h"
#include "tests/cli/train_runs.h"
#include "tests/support/parameters.h"
#include "trireme/formats/safetensors.h"

namespace trireme::cli {
namespace {

class InitWeights : public TrainProgram {
 protected:
  /// Writes `weights` as a file and returns what reading it into `model` says.
  std::string read_into(LanguageModel& model, const std::map<std::string, at::Tensor>& weights) const {
    write_safetensors(path_, {weights.begin(), weights.end()});
    const auto names = model.named_parameters().keys();
    return error_text([&] { init_weights(model, read_initial_weights(path_, {names.begin(), names.end()})); });
  }

  std::filesystem::path path_ = folder_ / "w.safetensors";
  std::shared_ptr<LanguageModel> source_ = make_language_model(model_options(model_));
  std::shared_ptr<LanguageModel> target_ = make_language_model(model_options(model_));
};

TEST_F(InitWeights, TakesEveryTensorOfTheFile) {
  const auto weights = testing::parameters_of(*source_);
  EXPECT_FALSE(at::equal(weights.begin()->second, testing::parameters_of(*target_).begin()->second));
  EXPECT_EQ(read_into(*target_, weights), "(no error)");
  expect_same_weights(testing::parameters_of(*target_), weights);
}

TEST_F(InitWeights, NamesATensorThatIsMissingExtraOrOfAnotherShape) {
  const auto weights = testing::parameters_of(*source_);
  const std::string begin = "--init-from " + path_.string() + ": ";
  auto missing = weights;
  missing.erase("model.norm.weight");
  EXPECT_EQ(read_into(*target_, missing), begin + "no tensor 'model.norm.weight', which the model needs");
  auto extra = weights;
  extra["model.norm.weights"] = at::ones({32});
  EXPECT_EQ(read_into(*target_, extra),
            begin + "the model has no parameter 'model.norm.weights'. Did you mean `model.norm.weight`?");
  auto shape = weights;
  shape["model.norm.weight"] = at::ones({31});
  EXPECT_EQ(read_into(*target_, shape), begin + "'model.norm.weight' has shape [31], the model's is [32]");
}

// The published files of GPT-2 leave `transformer.` out and hold the causal mask of each layer.
TEST_F(InitWeights, ReadsGpt2AsItIsPublished) {
  const ModelOptions options =
      GptOptions{.vocab_size = 256, .n_embd = 16, .n_layer = 2, .n_head = 2, .n_positions = 32};
  const auto source = make_language_model(options), target = make_language_model(options);
  std::map<std::string, at::Tensor> published;
  for (const auto& [name, weight] : testing::parameters_of(*source)) {
    ASSERT_TRUE(name.starts_with("transformer.")) << name;
    published[name.substr(12)] = weight;
  }
  EXPECT_TRUE(published.contains("h.0.attn.c_attn.weight"));
  for (const std::string layer : {"h.0", "h.1"}) {
    published[layer + ".attn.bias"] = at::ones({1, 1, 32, 32});
    published[layer + ".attn.masked_bias"] = at::tensor(-1e4);
  }
  EXPECT_EQ(read_into(*target, published), "(no error)");
  expect_same_weights(testing::parameters_of(*target), testing::parameters_of(*source));
}

TEST_F(InitWeights, AreWhatARunStartsWith) {
  const auto weights = testing::parameters_of(*source_);
  write_safetensors(path_, {weights.begin(), weights.end()});
  const auto done = run_program(train("run", {"--steps", "1", "--lr", "0", "--init-from", path_}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  expect_same_weights(saved_weights("run"), weights);
}

TEST_F(InitWeights, RefuseAFileThatHoldsNone) {
  const auto wrong = run_program(train("run", {"--steps", "2", "--init-from", data_}));
  EXPECT_EQ(wrong.exit_code, 1);
  EXPECT_NE(wrong.err.find("story.txt"), std::string::npos) << wrong.err;
}

}  // namespace
}  // namespace trireme::cli
