#include "trireme/models/generate.h"

#include <gtest/gtest.h>
#include <torch/utils.h>

#include <algorithm>
#include <cmath>

#include "trireme/base/error.h"
#include "trireme/models/llama.h"

namespace trireme {
namespace {

Llama tiny(int64_t vocab_size = 11) {
  torch::manual_seed(1);
  return Llama(LlamaOptions{.vocab_size = vocab_size,
                            .hidden_size = 16,
                            .intermediate_size = 24,
                            .num_hidden_layers = 1,
                            .num_attention_heads = 2,
                            .num_key_value_heads = 2,
                            .max_position_embeddings = 16,
                            .initializer_range = 0.3});
}

/// A model that wants the same distribution after every token.
class Constant : public LanguageModel {
 public:
  explicit Constant(std::vector<float> logits) : logits_(torch::tensor(logits)) {}
  at::Tensor forward(const at::Tensor& tokens) override {
    return logits_.expand({tokens.size(0), tokens.size(1), vocab_size()});
  }
  at::Tensor decode(const at::Tensor& tokens, KvCache& cache) override {
    cache.length += tokens.size(1);
    return logits_.unsqueeze(0);
  }
  int64_t vocab_size() const override { return logits_.numel(); }
  int64_t max_positions() const override { return 1 << 20; }

 private:
  at::Tensor logits_;
};

TEST(Generate, TheSameSeedGivesTheSameTokens) {
  auto model = tiny();
  const auto make = [&](uint64_t seed) {
    return generate(*model, {1, 2}, {.max_new_tokens = 12, .temperature = 1, .seed = seed});
  };
  EXPECT_EQ(make(3), make(3));
  EXPECT_NE(make(3), make(4));
}

TEST(Generate, WithoutTemperatureEachTokenIsTheLikeliest) {
  auto model = tiny();
  const torch::NoGradGuard no_grad;
  std::vector<int64_t> tokens = {1, 2};
  const auto made = generate(*model, tokens, {.max_new_tokens = 10, .temperature = 0});
  ASSERT_EQ(made.size(), 10u);
  for (const int64_t token : made) {
    const auto logits = model->forward(torch::tensor(tokens, torch::kLong).unsqueeze(0));
    EXPECT_EQ(token, logits.select(1, -1).argmax().item<int64_t>());
    tokens.push_back(token);
  }
}

TEST(Generate, DrawsFollowTheProbabilities) {
  Constant model({std::log(1.0f), std::log(3.0f), std::log(6.0f)});
  const auto made = generate(model, {0}, {.max_new_tokens = 10000, .temperature = 1});
  // Four standard deviations of 10,000 draws are at most 200.
  EXPECT_NEAR(static_cast<double>(std::count(made.begin(), made.end(), 0)), 1000, 200);
  EXPECT_NEAR(static_cast<double>(std::count(made.begin(), made.end(), 1)), 3000, 200);
}

TEST(Generate, TemperatureIsAPowerOfTheProbabilities) {
  Constant model({std::log(1.0f), std::log(3.0f)});  // at temperature 0.5: 1 to 9
  const auto made = generate(model, {0}, {.max_new_tokens = 10000, .temperature = 0.5});
  EXPECT_NEAR(static_cast<double>(std::count(made.begin(), made.end(), 0)), 1000, 200);
}

TEST(Generate, TopKNeverDrawsTheOthers) {
  Constant model({0, 0.1f, 0.2f, 0.3f});
  const auto made = generate(model, {0}, {.max_new_tokens = 1000, .temperature = 5, .top_k = 2});
  EXPECT_TRUE(std::all_of(made.begin(), made.end(), [](int64_t token) { return token >= 2; }));
  EXPECT_GT(std::count(made.begin(), made.end(), 2), 0);
}

TEST(Generate, GoesOnBeyondTheModelsPositions) {
  auto model = tiny();  // 16 positions
  const std::vector<int64_t> prompt(20, 1);
  EXPECT_EQ(generate(*model, prompt, {.max_new_tokens = 40}).size(), 40u);
}

TEST(Generate, TextEndsAtTheDocumentEnd) {
  std::vector<float> logits(256, -100);
  logits['a'] = 1;
  Constant letters(logits);
  EXPECT_EQ(generate_text(letters, "x", {.max_new_tokens = 5}), "aaaaa");
  logits[0] = 200;
  Constant ends(logits);
  EXPECT_EQ(generate_text(ends, "x", {.max_new_tokens = 5}), "");
}

// As of a model with the vocabulary of a tokenizer that is trained on bytes.
TEST(Generate, TextIsOfBytesEvenWhereTheModelWantsATokenBeyond) {
  std::vector<float> logits(300, -100);
  logits['a'] = 1;
  logits[299] = 200;
  Constant wants_more(logits);
  EXPECT_EQ(generate_text(wants_more, "x", {.max_new_tokens = 5}), "aaaaa");
  EXPECT_EQ(generate(wants_more, {'x'}, {.max_new_tokens = 1}), std::vector<int64_t>{299});
}

/// The logits of a rank that has a half of the vocabulary.
class Half : public Constant {
 public:
  using Constant::Constant;
  int64_t vocab_size() const override { return 2 * Constant::vocab_size(); }
};

TEST(Generate, LogitsOfAPartOfTheVocabularyAreGathered) {
  Half model({0, 1});
  GenerateOptions options{.max_new_tokens = 2, .temperature = 0};
  EXPECT_THROW((void)generate(model, {0}, options), ShapeError);
  options.gather = [](const at::Tensor& own) { return torch::cat({own, own + 1}, -1); };
  EXPECT_EQ(generate(model, {0}, options), (std::vector<int64_t>{3, 3}));
}

TEST(Generate, WrongArgumentsAreNamed) {
  auto model = tiny();
  EXPECT_THROW(generate(*model, {}, {}), ShapeError);
  EXPECT_THROW(generate(*model, {11}, {}), ShapeError);
  EXPECT_THROW(generate(*model, {1}, {.temperature = -1}), ConfigError);
  EXPECT_THROW(generate(*model, {1}, {.top_k = -1}), ConfigError);
  EXPECT_THROW(generate(*model, {1}, {.max_new_tokens = -1}), ConfigError);
  EXPECT_THROW(generate_text(*model, "x", {}), ConfigError);  // 11 tokens are no bytes
}

}  // namespace
}  // namespace trireme
