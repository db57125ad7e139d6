#include "trireme/models/llama.h"

#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/utils.h>

#include <cmath>

#include "models/rope.h"
#include "tests/models/tokens.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using namespace testing;

LlamaOptions tiny_llama() {
  return {.vocab_size = 11,
          .hidden_size = 16,
          .intermediate_size = 24,
          .num_hidden_layers = 2,
          .num_attention_heads = 4,
          .num_key_value_heads = 2,
          .max_position_embeddings = 32};
}

TEST(Llama, MapsTokensToLogits) {
  Llama model(tiny_llama());
  EXPECT_EQ(model->forward(tokens(3, 5)).sizes(), (at::IntArrayRef{3, 5, 11}));
}

TEST(Llama, ParametersHaveHuggingFacesNamesAndShapes) {
  auto options = tiny_llama();
  options.num_hidden_layers = 1;
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const auto& item : Llama(options)->named_parameters()) shapes[item.key()] = item.value().sizes().vec();
  const std::map<std::string, std::vector<int64_t>> expected = {
      {"lm_head.weight", {11, 16}},
      {"model.embed_tokens.weight", {11, 16}},
      {"model.layers.0.input_layernorm.weight", {16}},
      {"model.layers.0.mlp.down_proj.weight", {16, 24}},
      {"model.layers.0.mlp.gate_proj.weight", {24, 16}},
      {"model.layers.0.mlp.up_proj.weight", {24, 16}},
      {"model.layers.0.post_attention_layernorm.weight", {16}},
      {"model.layers.0.self_attn.k_proj.weight", {8, 16}},
      {"model.layers.0.self_attn.o_proj.weight", {16, 16}},
      {"model.layers.0.self_attn.q_proj.weight", {16, 16}},
      {"model.layers.0.self_attn.v_proj.weight", {8, 16}},
      {"model.norm.weight", {16}},
  };
  EXPECT_EQ(shapes, expected);
}

TEST(Llama, TiedEmbeddingsAreOneParameterWithBothGradients) {
  torch::manual_seed(1);
  auto options = tiny_llama();
  options.tie_word_embeddings = true;
  Llama model(options);
  EXPECT_FALSE(model->named_parameters().contains("lm_head.weight"));
  const auto embedding = model->named_parameters()["model.embed_tokens.weight"];
  model->loss(torch::zeros({1, 4}, torch::kLong), torch::zeros({1, 4}, torch::kLong)).backward();
  // Only row 0 is looked up; that the others have a gradient shows the way through the logits.
  EXPECT_TRUE((embedding.grad().abs().sum(1) > 0).all().item<bool>());
}

TEST(Llama, TheFutureDoesNotReachThePast) {
  torch::manual_seed(2);
  Llama model(tiny_llama());
  const auto before = tokens(2, 8);
  auto after = before.clone();
  after.select(1, 5).add_(1).remainder_(11);
  const auto change = (model->forward(before) - model->forward(after)).abs().amax({0, 2});
  EXPECT_EQ(change.slice(0, 0, 5).max().item<float>(), 0);
  EXPECT_GT(change.slice(0, 5).min().item<float>(), 0);
}

TEST(Llama, EveryParameterGetsAContiguousGradient) {
  torch::manual_seed(3);
  Llama model(tiny_llama());
  model->loss(tokens(2, 8), tokens(2, 8)).backward();
  for (const auto& item : model->named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_TRUE(item.value().grad().is_contiguous()) << item.key();
    EXPECT_GT(item.value().grad().abs().max().item<float>(), 0) << item.key();
  }
}

TEST(Llama, WithZeroWeightsTheLossIsThatOfAGuess) {
  Llama model(tiny_llama());
  const torch::NoGradGuard no_grad;
  for (auto& parameter : model->parameters()) parameter.zero_();
  EXPECT_NEAR(model->loss(tokens(2, 8), tokens(2, 8)).item<double>(), std::log(11.0), 1e-6);
}

// A model whose output can be written down: one layer, whose attention and MLP add nothing (o_proj and down_proj are
// 0), so that logits are lm_head * RMSNorm(embedding).
TEST(Llama, LogitsAreTheProjectedNormOfTheEmbeddingWhenLayersAddNothing) {
  torch::manual_seed(4);
  auto options = tiny_llama();
  options.rms_norm_eps = 0.5;  // large enough to be seen
  Llama model(options);
  const torch::NoGradGuard no_grad;
  auto weights = model->named_parameters();
  for (const auto& item : weights) {
    const bool adds = item.key().ends_with("o_proj.weight") || item.key().ends_with("down_proj.weight");
    if (adds) item.value().zero_();
  }
  torch::nn::init::uniform_(weights["model.norm.weight"], 0.5, 2);
  const auto x = weights["model.embed_tokens.weight"].to(torch::kDouble);
  const auto norm = x / torch::sqrt(x.square().mean(1, true) + 0.5) * weights["model.norm.weight"].to(torch::kDouble);
  const auto expected = norm.matmul(weights["lm_head.weight"].to(torch::kDouble).t());
  const auto got = model->forward(torch::arange(11, torch::kLong).unsqueeze(0)).squeeze(0);
  EXPECT_TRUE(torch::allclose(got.to(torch::kDouble), expected, 1e-5, 1e-7));  // fp32 against double
}

// The whole formula once more in double, written as in the reference: rotate_half, repeated key-value heads, softmax.
TEST(Llama, AgreesWithTheFormulaWrittenOut) {
  torch::manual_seed(5);
  auto options = tiny_llama();
  options.num_hidden_layers = 1;
  options.initializer_range = 0.3;  // so that attention is far from uniform
  Llama model(options);
  const torch::NoGradGuard no_grad;
  std::map<std::string, at::Tensor> w;
  for (const auto& item : model->named_parameters()) w[item.key()] = item.value().to(torch::kDouble);
  const int64_t S = 6, N = 4, D = 4;
  const auto ids = tokens(1, S);
  const std::string layer = "model.layers.0.";
  const auto norm = [&](const at::Tensor& x, const std::string& name) {
    return x / torch::sqrt(x.square().mean(-1, true) + options.rms_norm_eps) * w[name + ".weight"];
  };
  const auto project = [&](const at::Tensor& x, const std::string& name) {
    return x.matmul(w[layer + name + ".weight"].t());
  };
  const auto rotate = [&](const at::Tensor& x_NSD) {
    const auto frequency = torch::pow(10000.0, -torch::arange(0, D, 2, torch::kDouble) / static_cast<double>(D));
    const auto half = torch::arange(S, torch::kDouble).unsqueeze(1) * frequency;
    const auto angle = torch::cat({half, half}, 1);
    const auto turned = torch::cat({-x_NSD.slice(2, D / 2), x_NSD.slice(2, 0, D / 2)}, 2);
    return x_NSD * angle.cos() + turned * angle.sin();
  };
  auto x = w["model.embed_tokens.weight"].index_select(0, ids[0]);
  const auto h = norm(x, layer + "input_layernorm");
  const auto q = rotate(project(h, "self_attn.q_proj").view({S, N, D}).transpose(0, 1));
  const auto k = rotate(project(h, "self_attn.k_proj").view({S, 2, D}).transpose(0, 1)).repeat_interleave(2, 0);
  const auto v = project(h, "self_attn.v_proj").view({S, 2, D}).transpose(0, 1).repeat_interleave(2, 0);
  const auto future = torch::ones({S, S}, torch::kBool).triu(1);
  const auto scores = (q.matmul(k.transpose(1, 2)) / std::sqrt(D)).masked_fill(future, -INFINITY).softmax(-1);
  x = x + project(scores.matmul(v).transpose(0, 1).reshape({S, N * D}), "self_attn.o_proj");
  const auto m = norm(x, layer + "post_attention_layernorm");
  const auto gate = project(m, "mlp.gate_proj");
  x = x + project(gate * torch::sigmoid(gate) * project(m, "mlp.up_proj"), "mlp.down_proj");
  const auto expected = norm(x, "model.norm").matmul(w["lm_head.weight"].t());
  EXPECT_TRUE(torch::allclose(model->forward(ids)[0].to(torch::kDouble), expected, 1e-4, 1e-5));  // fp32 against double
}

TEST(Llama, InSixteenBitsItStaysCloseToThirtyTwo) {
  torch::manual_seed(6);
  Llama model(tiny_llama());
  const auto input = tokens(2, 8);
  const auto expected = model->loss(input, input).item<double>();
  model->to(torch::kBFloat16);
  const auto loss = model->loss(input, input);
  EXPECT_EQ(loss.scalar_type(), torch::kFloat);
  EXPECT_NEAR(loss.item<double>(), expected, 0.01);  // bf16 keeps 8 bits: 0.4 % of logits below 1
}

TEST(Llama, InSixteenBitsTheNormIsRoundedBeforeItsWeight) {
  torch::manual_seed(9);
  Llama model(tiny_llama());
  const torch::NoGradGuard no_grad;
  auto weights = model->named_parameters();
  for (const auto& item : weights) {
    const bool adds = item.key().ends_with("o_proj.weight") || item.key().ends_with("down_proj.weight");
    if (adds) item.value().zero_();
  }
  torch::nn::init::uniform_(weights["model.norm.weight"], 0.5, 2);
  model->to(torch::kBFloat16);
  weights = model->named_parameters();
  const auto x = weights["model.embed_tokens.weight"].to(torch::kFloat);
  const auto norm = (x * torch::rsqrt(x.pow(2).mean(-1, true) + 1e-6)).to(torch::kBFloat16);
  const auto expected = torch::linear((weights["model.norm.weight"] * norm).unsqueeze(0), weights["lm_head.weight"]);
  EXPECT_TRUE(torch::equal(model->forward(torch::arange(11, torch::kLong).unsqueeze(0)), expected));
}

TEST(Llama, TrainsAfterARunInInferenceMode) {
  Llama model(tiny_llama());
  {
    const c10::InferenceMode inference;
    model->forward(tokens(1, 8));
  }
  EXPECT_NO_THROW(model->loss(tokens(1, 8), tokens(1, 8)).backward());
}

TEST(Llama, DecodingOneByOneGivesTheLogitsOfTheWhole) {
  torch::manual_seed(7);
  Llama model(tiny_llama());
  const torch::NoGradGuard no_grad;
  const auto ids = tokens(2, 10);
  const auto whole = model->forward(ids);
  KvCache cache;
  EXPECT_TRUE(torch::allclose(model->decode(ids.slice(1, 0, 4), cache), whole.select(1, 3), 1e-4, 1e-5));
  for (int64_t i = 4; i < 10; ++i) {
    // Attention over a cache sums in another order.
    EXPECT_TRUE(torch::allclose(model->decode(ids.slice(1, i, i + 1), cache), whole.select(1, i), 1e-4, 1e-5)) << i;
  }
  EXPECT_EQ(cache.length, 10);
}

TEST(Llama, WrongTokensAreShapeErrors) {
  Llama model(tiny_llama());
  EXPECT_THROW(model->forward(torch::zeros({4}, torch::kLong)), ShapeError);
  EXPECT_THROW(model->forward(torch::zeros({1, 4})), ShapeError);
  EXPECT_THROW(model->forward(torch::zeros({1, 33}, torch::kLong)), ShapeError);
  EXPECT_THROW(model->forward(torch::zeros({1, 0}, torch::kLong)), ShapeError);
  KvCache cache;
  model->decode(tokens(1, 2), cache);
  EXPECT_THROW(model->decode(tokens(1, 2), cache), ShapeError);
}

TEST(Llama, OptionsThatDoNotFitAreRefused) {
  const auto with = [](auto change) {
    auto options = tiny_llama();
    change(options);
    return options;
  };
  EXPECT_THROW(Llama(with([](auto& o) { o.hidden_size = 18; })), ConfigError);
  EXPECT_THROW(Llama(with([](auto& o) { o.num_key_value_heads = 3; })), ConfigError);
  EXPECT_THROW(Llama(with([](auto& o) { o.head_dim = 3; })), ConfigError);
  EXPECT_THROW(Llama(with([](auto& o) { o.vocab_size = 0; })), ConfigError);
  EXPECT_THROW(Llama(with([](auto& o) { o.rms_norm_eps = 0; })), ConfigError);
}

TEST(Rope, ScoresDependOnDistanceOnly) {
  torch::manual_seed(8);
  RopeCache cache(8, 10000);
  const auto q = torch::randn({1, 1, 1, 8}, torch::kDouble).expand({1, 20, 1, 8});
  const auto k = torch::randn({1, 1, 1, 8}, torch::kDouble).expand({1, 20, 1, 8});
  const auto angles = cache.angles(0, 20, torch::kDouble);
  const auto turned_q = apply_rope(q, angles).view({20, 8});
  const auto turned_k = apply_rope(k, angles).view({20, 8});
  const auto scores = turned_q.matmul(turned_k.t());
  for (int64_t distance = 0; distance < 10; ++distance) {
    const auto diagonal = scores.diagonal(distance);
    // Angles are fp32: 20 rad to 24 bits.
    EXPECT_LT((diagonal - diagonal[0]).abs().max().item<double>(), 2e-5) << distance;
  }
}

TEST(Rope, AnglesDoNotDependOnWhatWasAskedForBefore) {
  RopeCache fresh(8, 10000), used(8, 10000);
  used.angles(0, 3, torch::kFloat);
  used.angles(3, 1, torch::kFloat);
  EXPECT_TRUE(torch::equal(used.angles(5, 4, torch::kFloat).cos, fresh.angles(0, 9, torch::kFloat).cos.slice(0, 5)));
}

TEST(Rope, SixteenBitAnglesAreRoundedFromThirtyTwo) {
  RopeCache cache(8, 10000);
  const auto rounded = cache.angles(0, 2000, torch::kBFloat16).sin;
  const auto exact = cache.angles(0, 2000, torch::kFloat).sin;
  EXPECT_TRUE(torch::equal(rounded, exact.to(torch::kBFloat16)));
}

}  // namespace
}  // namespace trireme
