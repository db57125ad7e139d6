#include "trireme/models/gpt.h"

#include <gtest/gtest.h>
#include <torch/utils.h>

#include <cmath>

#include "tests/models/tokens.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using namespace testing;

GptOptions tiny_gpt() { return {.vocab_size = 11, .n_embd = 16, .n_layer = 2, .n_head = 4, .n_positions = 32}; }

TEST(Gpt, ParametersHaveHuggingFacesNamesAndShapes) {
  auto options = tiny_gpt();
  options.n_layer = 1;
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const auto& item : Gpt(options)->named_parameters()) shapes[item.key()] = item.value().sizes().vec();
  const std::map<std::string, std::vector<int64_t>> expected = {
      {"transformer.h.0.attn.c_attn.bias", {48}},
      {"transformer.h.0.attn.c_attn.weight", {16, 48}},
      {"transformer.h.0.attn.c_proj.bias", {16}},
      {"transformer.h.0.attn.c_proj.weight", {16, 16}},
      {"transformer.h.0.ln_1.bias", {16}},
      {"transformer.h.0.ln_1.weight", {16}},
      {"transformer.h.0.ln_2.bias", {16}},
      {"transformer.h.0.ln_2.weight", {16}},
      {"transformer.h.0.mlp.c_fc.bias", {64}},
      {"transformer.h.0.mlp.c_fc.weight", {16, 64}},
      {"transformer.h.0.mlp.c_proj.bias", {16}},
      {"transformer.h.0.mlp.c_proj.weight", {64, 16}},
      {"transformer.ln_f.bias", {16}},
      {"transformer.ln_f.weight", {16}},
      {"transformer.wpe.weight", {32, 16}},
      {"transformer.wte.weight", {11, 16}},
  };
  EXPECT_EQ(shapes, expected);
}

TEST(Gpt, TheFutureDoesNotReachThePast) {
  torch::manual_seed(2);
  Gpt model(tiny_gpt());
  const auto before = tokens(2, 8);
  auto after = before.clone();
  after.select(1, 5).add_(1).remainder_(11);
  const auto change = (model->forward(before) - model->forward(after)).abs().amax({0, 2});
  EXPECT_EQ(change.slice(0, 0, 5).max().item<float>(), 0);
  EXPECT_GT(change.slice(0, 5).min().item<float>(), 0);
}

TEST(Gpt, EveryParameterGetsAContiguousGradient) {
  torch::manual_seed(3);
  Gpt model(tiny_gpt());
  model->loss(tokens(2, 8), tokens(2, 8)).backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_TRUE(item.value().grad().is_contiguous()) << item.key();
  }
}

TEST(Gpt, LogitsAreThoseOfTheSumOfEmbeddingsWhenLayersAddNothing) {
  torch::manual_seed(4);
  Gpt model(tiny_gpt());
  const torch::NoGradGuard no_grad;
  auto weights = model->named_parameters();
  for (const auto& item : weights) {
    if (item.key().find("c_proj") != std::string::npos) item.value().zero_();
  }
  const auto token = weights["transformer.wte.weight"].to(torch::kDouble);
  const auto x = token + weights["transformer.wpe.weight"].slice(0, 0, 11).to(torch::kDouble);
  const auto expected = torch::layer_norm(x, {16}, {}, {}, 1e-5).matmul(token.t());
  const auto got = model->forward(torch::arange(11, torch::kLong).unsqueeze(0)).squeeze(0);
  EXPECT_TRUE(torch::allclose(got.to(torch::kDouble), expected, 1e-5, 1e-6));  // fp32 against double
}

TEST(Gpt, DecodingOneByOneGivesTheLogitsOfTheWhole) {
  torch::manual_seed(7);
  Gpt model(tiny_gpt());
  const torch::NoGradGuard no_grad;
  const auto ids = tokens(2, 10);
  const auto whole = model->forward(ids);
  KvCache cache;
  model->decode(ids.slice(1, 0, 4), cache);
  for (int64_t i = 4; i < 10; ++i) {
    EXPECT_TRUE(torch::allclose(model->decode(ids.slice(1, i, i + 1), cache), whole.select(1, i), 1e-4, 1e-5)) << i;
  }
}

TEST(Gpt, ATooLongSequenceIsAShapeError) {
  EXPECT_THROW(Gpt(tiny_gpt())->forward(torch::zeros({1, 33}, torch::kLong)), ShapeError);
}

}  // namespace
}  // namespace trireme
