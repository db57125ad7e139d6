// Mistakes in what ranks that share layers exchange are named before the first update.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <limits>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "tests/parity/cases.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/engine.h"
#include "trireme/intercept.h"
#include "trireme/intercept/random_streams.h"

namespace trireme::tensor_proof {
namespace {

using namespace testing;

constexpr int64_t kHidden = 16, kHeads = 4, kHeadSize = 4, kVocab = 12, kLength = 6;
constexpr int kNone = -1;

/// A world whose sums are counted from `begin()` on, and of which one does something else.
class FaultyWorld final : public comm::Backend {
 public:
  enum class Fault { kLeftOut, kMean, kTwice };

  FaultyWorld(Group& world, int faulty, Fault fault)
      : Backend(world.backend().state()), world_(world.backend()), faulty_(faulty), fault_(fault) {}

  Pending<void> submit(comm::Request request) override {
    const bool is_scatter = request.call.kind == comm::CallKind::kReduceScatter;
    const bool is_counted = counts_ && (is_scatter || request.call.kind == comm::CallKind::kAllReduce);
    const bool is_faulty = is_counted && seen++ == faulty_;
    if (!is_faulty) return world_.submit(std::move(request));
    const at::Tensor tensor = request.output;
    if (fault_ == Fault::kLeftOut) {
      if (is_scatter) tensor.copy_(request.input.narrow(0, tensor.numel() * info().place.rank, tensor.numel()));
      return {};
    }
    world_.submit(std::move(request)).wait();
    if (fault_ == Fault::kTwice) tensor.mul_(2);
    if (fault_ == Fault::kMean) tensor.div_(2);
    return {};
  }
  std::unique_ptr<Backend> split(const comm::Split& split) override { return world_.split(split); }
  void begin() { counts_ = true; }
  void end() { counts_ = false; }

  int seen = 0;

 private:
  Backend& world_;
  const int faulty_;
  const Fault fault_;
  bool counts_ = false;
};

/// A block with norms of heads, biases and a tied head.
class Net : public torch::nn::Module {
 public:
  Net() {
    embed_tokens = register_module("embed_tokens", torch::nn::Embedding(kVocab, kHidden));
    const auto linear = [&](const std::string& name, int64_t in, int64_t out, bool has_bias = true) {
      return register_module(name, torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(has_bias)));
    };
    q = linear("q_proj", kHidden, kHidden);
    k = linear("k_proj", kHidden, kHidden);
    v = linear("v_proj", kHidden, kHidden);
    o = linear("o_proj", kHidden, kHidden);
    up = linear("up_proj", kHidden, 3 * kHidden);
    down = linear("down_proj", 3 * kHidden, kHidden);
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kHidden})));
    q_norm = register_module("q_norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kHeadSize})));
  }

  at::Tensor forward(const at::Tensor& tokens) {
    at::Tensor x = norm->forward(embed_tokens->forward(tokens));
    const auto heads = [](const at::Tensor& y) { return y.unflatten(-1, {-1, kHeadSize}).transpose(1, 2); };
    const at::Tensor attended = at::scaled_dot_product_attention(q_norm->forward(heads(q->forward(x))),
                                                                 heads(k->forward(x)), heads(v->forward(x)));
    x = x + o->forward(attended.transpose(1, 2).flatten(2));
    at::Tensor hidden = up->forward(x).tanh();
    if (after_up) hidden = after_up(hidden);
    x = x + down->forward(hidden);
    if (before_head) x = before_head(x);
    return at::linear(x, embed_tokens->weight);
  }

  std::function<at::Tensor(const at::Tensor&)> after_up, before_head;
  torch::nn::Embedding embed_tokens{nullptr};
  torch::nn::Linear q{nullptr}, k{nullptr}, v{nullptr}, o{nullptr}, up{nullptr}, down{nullptr};
  torch::nn::LayerNorm norm{nullptr}, q_norm{nullptr};
};

Json settings(bool shards_tokens) {
  const auto layer = [](const char* pattern, const char* type) {
    return Json{{"patterns", {pattern}}, {"partition_type", type}};
  };
  return {{"train_micro_batch_size_per_gpu", 2},
          {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.1}}}}},
          {"tensor_parallel",
           {{"autotp_size", 2},
            {"sequence_parallel", shards_tokens},
            {"partition_config",
             {{"use_default_specs", false},
              {"layer_specs",
               {layer("[qkv]_proj\\.weight", "column"), layer("up_proj\\.weight", "column"),
                layer("(o|down)_proj\\.weight", "row")}}}}}}};
}

struct Planted {
  int sum = kNone;
  FaultyWorld::Fault fault = FaultyWorld::Fault::kLeftOut;
  std::function<void(Net&, int rank)> in_model = {};
  std::function<void(at::Tensor& tokens, int rank)> in_batch = {};
  std::function<at::Tensor(const at::Tensor& loss, int rank)> in_loss = {};
  bool shards_tokens = false;
  int overflows = 0;  ///< steps before it whose gradients are not finite, and which are skipped
};

struct Told {
  std::vector<std::string> texts = std::vector<std::string>(2);
  int sums = 0;
  bool has_changed = false;
};

/// One step of two ranks that share layers.
Told step_with(const Planted& planted) {
  Told told;
  run_ranks(2, [&](Rank& rank) {
    RankContext::of_this_thread().streams().use_own_generator(5);
    at::set_num_threads(1);
    auto backend = std::make_unique<FaultyWorld>(rank.world(), planted.sum, planted.fault);
    FaultyWorld& faults = *backend;
    Group world(std::move(backend));
    Net net;
    draw_weights(net);
    Json json = settings(planted.shards_tokens);
    if (planted.overflows > 0) json["fp16"] = {{"enabled", true}, {"initial_scale_power", 8}, {"hysteresis", 1}};
    InitializeOptions options{.config = config_from_json(json, 2)};
    options.partition_model = PartitionModel{.heads = kHeads, .key_value_heads = kHeads};
    options.takes_sizes_from_inputs = planted.shards_tokens;  // the net reads no sizes
    Engine engine(world, net, options);
    if (planted.in_model) planted.in_model(net, rank.id());
    const at::Tensor before = net.norm->weight.detach().clone();
    for (int i = 0; i < planted.overflows; ++i) {
      const at::Tensor tokens = tokens_of({0, 0}, kVocab, {2, kLength});
      const at::Tensor loss = at::cross_entropy_loss(net.forward(tokens).view({-1, kVocab}), tokens.view(-1));
      engine.backward(loss * std::numeric_limits<float>::infinity());
      engine.step();
    }
    faults.begin();
    try {
      at::Tensor tokens = tokens_of({0, 0}, kVocab, {2, kLength});
      if (planted.in_batch) planted.in_batch(tokens, rank.id());
      at::Tensor loss = at::cross_entropy_loss(net.forward(tokens).view({-1, kVocab}), tokens.view(-1));
      if (planted.in_loss) loss = planted.in_loss(loss, rank.id());
      engine.backward(loss);
      faults.end();  // what follows is the step's
      engine.step();
    } catch (const StateError& error) {
      told.texts[static_cast<size_t>(rank.id())] = error.what();
    }
    if (rank.id() == 0) told.sums = faults.seen;
    if (!before.equal(net.norm->weight)) told.has_changed = true;
  });
  return told;
}

void expect_named(const std::string& what, const Planted& planted, const std::string& name) {
  const Told told = step_with(planted);
  for (const std::string& text : told.texts) {
    EXPECT_NE(text, "") << what;
    EXPECT_NE(text.find(name), std::string::npos) << what << ": " << text;
  }
  EXPECT_FALSE(told.has_changed) << what;
}

TEST(TensorProof, NothingIsToldOfWhatIsRight) {
  const Told told = step_with({});
  EXPECT_EQ(told.texts[0], "");
  EXPECT_TRUE(told.has_changed);
  EXPECT_EQ(told.sums, 8);
}

/// Sums of forward and backward: of rows, the tied head, norms of heads, layers' inputs.
TEST(TensorProof, AnExchangeThatIsLeftOutIsNamed) {
  const char* const operators[] = {
      "aten::matmul in forward",      "aten::matmul in forward",  "the loss is",
      "aten::linear in backward",     "aten::matmul in backward", "aten::layer_norm in backward",
      "aten::layer_norm in backward", "aten::matmul in backward"};
  for (int i = 0; i < 8; ++i) expect_named(str("all-reduce ", i), {.sum = i}, operators[i]);
}

/// A gradient that all ranks get alike, and wrong.
TEST(TensorProof, AnExchangeThatIsNoSumIsNamed) {
  using Fault = FaultyWorld::Fault;
  for (const int i : {0, 2, 3, 5, 7})
    for (const Fault fault : {Fault::kMean, Fault::kTwice})
      expect_named(str("all-reduce ", i), {.sum = i, .fault = fault}, "is wrong: aten::");
}

/// A step that is skipped proves nothing, and accuses nobody.
TEST(TensorProof, ExchangesAreShownInTheFirstStepThatIsNotSkipped) {
  const Told right = step_with({.overflows = 2});
  EXPECT_EQ(right.texts[0], "");
  EXPECT_TRUE(right.has_changed);
  for (const int i : {0, 3, 5})
    expect_named(str("all-reduce ", i, " behind skipped steps"),
                 {.sum = i, .fault = FaultyWorld::Fault::kTwice, .overflows = 2}, "is wrong: aten::");
}

/// Sums of which ranks get some tokens each, and those of what all tokens share.
TEST(TensorProof, ExchangesOfShardedTokensAreNamed) {
  using Fault = FaultyWorld::Fault;
  const Told told = step_with({.shards_tokens = true});
  EXPECT_EQ(told.texts[0], "");
  EXPECT_TRUE(told.has_changed);
  ASSERT_GT(told.sums, 6);
  for (int i = 0; i < told.sums; ++i)
    for (const Fault fault : {Fault::kLeftOut, Fault::kMean, Fault::kTwice})
      expect_named(str("sum ", i), {.sum = i, .fault = fault, .shards_tokens = true}, "");
}

TEST(TensorProof, WhatOneRankDoesAloneIsNamed) {
  expect_named("another batch",
               {.in_batch = [](at::Tensor& tokens, int rank) { tokens.add_(rank).remainder_(kVocab); }}, "the loss is");
  expect_named("another loss", {.in_loss = [](const at::Tensor& loss, int rank) { return loss * (1 + rank); }},
               "the loss is");
  expect_named("a weight that is edited",
               {.in_model =
                    [](Net& net, int rank) {
                      const at::NoGradGuard no_grad;
                      net.norm->weight.add_(rank);
                    }},
               "on the axis \"tensor\"");
  expect_named("other random numbers",
               {.in_model =
                    [](Net& net, int rank) {
                      RankContext::of_this_thread().streams().seed(static_cast<uint64_t>(rank));
                      net.before_head = [](const at::Tensor& x) { return at::dropout(x, 0.5, true); };
                    }},
               "on the axis \"tensor\"");
  expect_named(
      "a hook on gradients",
      {.in_model =
           [](Net& net, int rank) {
             net.norm->weight.register_hook([rank](const at::Tensor& gradient) { return gradient * (1 + rank); });
           }},
      "\"norm.weight\"");
}

TEST(TensorProof, NumbersOfOneRankAreNamed) {
  expect_named("features that nobody has seen",
               {.in_model =
                    [](Net& net, int) {
                      net.after_up = [](const at::Tensor& x) {
                        const WithoutInterception unseen;
                        return x * 2;
                      };
                    }},
               "which is not cut");
  expect_named(
      "a mean by a slice's size",
      {.in_model = [](Net& net,
                      int) { net.after_up = [](const at::Tensor& x) { return x - x.sum(-1, true) / x.size(-1); }; }},
      "divides a sum over the 48 elements of a tensor that is cut by 24");
}

}  // namespace
}  // namespace trireme::tensor_proof
