#include <gtest/gtest.h>

#include "trireme/base/error.h"
#include "trireme/models/language_model.h"

namespace trireme {
namespace {

// Hand-written, so that nothing is shared with the code under test: of each layer q, k, v, o and the three of the MLP.
TEST(TrainingFlops, OfLlamaAreSixPerWeightOfAProductAndTwelvePerPositionAttendedTo) {
  const LlamaOptions options = {.vocab_size = 100,
                                .hidden_size = 24,
                                .intermediate_size = 20,
                                .num_hidden_layers = 3,
                                .num_attention_heads = 4,
                                .num_key_value_heads = 2,
                                .head_dim = 10};
  const int64_t layer = 24 * 40 + 24 * 20 + 24 * 20 + 40 * 24 + 3 * (24 * 20);
  EXPECT_EQ(training_flops_per_token(options, 7), 6 * (3 * layer + 100 * 24) + 12 * 3 * (4 * 10) * 7);
}

TEST(TrainingFlops, CountTheOutputHeadOnceWhetherTiedOrNot) {
  LlamaOptions options;
  const auto untied = training_flops_per_token(options, 128);
  options.tie_word_embeddings = true;
  EXPECT_EQ(training_flops_per_token(options, 128), untied);
}

TEST(TrainingFlops, OfGpt2LeavePositionsBiasesAndNormsOut) {
  const GptOptions options = {
      .vocab_size = 13, .n_embd = 24, .n_layer = 3, .n_head = 4, .n_inner = 7, .n_positions = 9};
  const int64_t layer = 24 * 72 + 24 * 24 + 2 * (24 * 7);
  EXPECT_EQ(training_flops_per_token(options, 5), 6 * (3 * layer + 13 * 24) + 12 * 3 * 24 * 5);
}

// parameters - embedding - norms of each layer and the last one, by 6; then attention over 8192 positions.
TEST(TrainingFlops, OfTheLargeBuiltInModelsAreClosedForms) {
  EXPECT_EQ(training_flops_per_token(model_options("llama-8b"), 8192),
            6 * (8'030'261'248 - 128'256 * 4096 - 32 * 2 * 4096 - 4096) + int64_t{12} * 32 * 4096 * 8192);
  // Tied: the embedding is the head, and stays.
  EXPECT_EQ(training_flops_per_token(model_options("llama-1b"), 8192),
            6 * (int64_t{1'235'814'400} - 16 * 2 * 2048 - 2048) + int64_t{12} * 16 * 2048 * 8192);
}

TEST(TrainingFlops, RefuseWhatCannotBe) {
  EXPECT_THROW(training_flops_per_token(LlamaOptions{}, 0), ConfigError);
  EXPECT_THROW(training_flops_per_token(LlamaOptions{.num_hidden_layers = 0}, 1), ConfigError);
}

}  // namespace
}  // namespace trireme
