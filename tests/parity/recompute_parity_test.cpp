// Training with recomputation gives the bits of training without, whatever else is configured.
#include <ATen/Parallel.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include "tests/support/count_of.h"
#include "tests/support/live_bytes.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/engine/model_engine.h"
#include "trireme/intercept.h"
#include "trireme/models/gpt.h"
#include "trireme/models/llama.h"
#include "trireme/recompute/selective.h"

namespace trireme {
namespace {

using testing::LiveBytes;

constexpr int64_t kMicroSteps = 4, kAccumulation = 2;

/// Three residual layers with dropout, which can be recomputed.
class DropoutNet final : public LanguageModel {
 public:
  DropoutNet() {
    embedding_ = register_parameter("embedding", at::randn({11, 16}));
    for (int i = 0; i < 3; ++i) {
      up_.push_back(add("up", {32, 16}));
      down_.push_back(add("down", {16, 32}));
    }
  }
  at::Tensor forward(const at::Tensor& tokens) override {
    at::Tensor x = at::embedding(embedding_, tokens);
    for (size_t i = 0; i < up_.size(); ++i) {
      const auto layer = [up = up_[i], down = down_[i]](const at::Tensor& t) {
        const auto wide = at::dropout(at::silu(at::linear(t, up)), 0.25, true);
        return t + at::dropout(at::linear(wide, down), 0.5, true);
      };
      x = recomputes_layers() ? recompute(layer, x) : layer(x);
    }
    return at::linear(x, embedding_);
  }
  at::Tensor decode(const at::Tensor& tokens, KvCache&) override { return forward(tokens); }
  int64_t vocab_size() const override { return 11; }
  int64_t max_positions() const override { return 64; }

 private:
  at::Tensor add(const std::string& name, at::IntArrayRef shape) {
    return register_parameter(str(name, parameters().size()), at::randn(shape));
  }
  at::Tensor embedding_;
  std::vector<at::Tensor> up_, down_;
};

std::shared_ptr<LanguageModel> make_net(const std::string& name) {
  std::shared_ptr<LanguageModel> net;
  if (name == "Dropout") net = std::make_shared<DropoutNet>();
  if (name == "Gpt")
    net = std::make_shared<GptImpl>(
        GptOptions{.vocab_size = 11, .n_embd = 16, .n_layer = 2, .n_head = 2, .n_positions = 32});
  if (name == "Llama")
    net = std::make_shared<LlamaImpl>(LlamaOptions{.vocab_size = 11,
                                                   .hidden_size = 16,
                                                   .intermediate_size = 48,
                                                   .num_hidden_layers = 3,
                                                   .num_attention_heads = 4,
                                                   .num_key_value_heads = 2,
                                                   .max_position_embeddings = 32,
                                                   .tie_word_embeddings = true});
  testing::draw_weights(*net);
  return net;
}

struct RecomputeOutcome {
  std::vector<double> losses;
  std::vector<double> norms;
  std::vector<at::Tensor> weights;
};

struct RecomputeRun {
  std::string model;
  int world = 1;
  at::ScalarType dtype = at::kFloat;
  int stage = 0;
  GatherPolicy gather = GatherPolicy::kAuto;
};

RecomputeOutcome train(const RecomputeRun& setting, const RecomputeConfig& recompute) {
  RecomputeOutcome outcome;
  run_ranks(setting.world, [&](Rank& rank) {
    at::set_num_threads(1);
    const auto net = make_net(setting.model);
    Config config = default_config(setting.world);
    config.batch = {kAccumulation * setting.world, 1, kAccumulation};
    config.optimizer = {.kind = OptimizerKind::kAdamW, .lr = 1e-2};
    config.precision.weight_dtype = setting.dtype;
    config.pager.stage = setting.stage;
    config.pager.gather = setting.gather;
    config.pager.poison = true;
    config.pager.units.merge_below_bytes = 0;
    config.pager.live_bytes = 0;
    config.recompute = recompute;
    Engine engine(rank.world(), *net, {.config = config});
    RankContext::of_this_thread().streams().use_own_generator(100 + rank.id());
    for (int64_t step = 0; step < kMicroSteps; ++step) {
      const auto generator = at::detail::createCPUGenerator(1000 + step * rank.size() + rank.id());
      const auto tokens = at::randint(11, {2, 9}, generator, at::kLong);
      const auto loss = net->loss(tokens.narrow(1, 0, 8), tokens.narrow(1, 1, 8).contiguous());
      engine.backward(loss);
      engine.step();
      if (rank.id() != 0) continue;
      outcome.losses.push_back(loss.item<double>());
      if (step % kAccumulation == kAccumulation - 1) outcome.norms.push_back(engine.get_global_grad_norm().value());
    }
    engine.destroy();
    if (rank.id() == 0)
      for (const at::Tensor& weight : net->parameters()) outcome.weights.push_back(weight.detach().clone());
  });
  return outcome;
}

class RecomputeParity : public ::testing::TestWithParam<std::tuple<const char*, int, at::ScalarType>> {};

TEST_P(RecomputeParity, EveryStageTrainsAsWithout) {
  const auto& [model, world, dtype] = GetParam();
  const std::pair<int, GatherPolicy> stages[] = {{0, GatherPolicy::kAuto},
                                                 {1, GatherPolicy::kAuto},
                                                 {2, GatherPolicy::kAuto},
                                                 {3, GatherPolicy::kShared},
                                                 {3, GatherPolicy::kCopy}};
  for (const auto& [stage, gather] : stages) {
    const RecomputeRun setting{model, world, dtype, stage, gather};
    const RecomputeOutcome expected = train(setting, {});
    for (const RecomputeConfig& recompute :
         {RecomputeConfig{RecomputeMode::kFull, {}}, RecomputeConfig{RecomputeMode::kSelective, {}},
          RecomputeConfig{RecomputeMode::kSelective, {.keep = {}, .extra_compute = 0.2}}}) {
      const RecomputeOutcome got = train(setting, recompute);
      const std::string what = str("stage ", stage, gather == GatherPolicy::kCopy ? " copy" : "", ", mode ",
                                   static_cast<int>(recompute.mode), ", extra ", recompute.selective.extra_compute);
      EXPECT_EQ(got.losses, expected.losses) << what;
      EXPECT_EQ(got.norms, expected.norms) << what;
      ASSERT_EQ(got.weights.size(), expected.weights.size());
      for (size_t i = 0; i < expected.weights.size(); ++i)
        EXPECT_TRUE(at::equal(got.weights[i], expected.weights[i])) << what << ", parameter " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Models, RecomputeParity,
                         ::testing::Combine(::testing::Values("Llama", "Gpt", "Dropout"), ::testing::Values(1, 2),
                                            ::testing::Values(at::kFloat, at::kBFloat16)),
                         [](const auto& info) {
                           return str(std::get<0>(info.param), "World", std::get<1>(info.param),
                                      std::get<2>(info.param) == at::kFloat ? "Fp32" : "Bf16");
                         });

/// The bytes that a forward of `net` leaves allocated.
int64_t activation_bytes(LanguageModel& net, const at::Tensor& tokens) {
  const LiveBytes live;
  const auto loss = net.loss(tokens, tokens);
  return live.bytes();
}

TEST(RecomputeMemory, FullKeepsLayerInputsAndSelectiveSavesSixtyPercent) {
  const auto net = make_language_model(model_options("llama-10m"));
  const auto tokens = at::randint(256, {1, 128}, at::kLong);
  activation_bytes(*net, tokens);  // the table of angles
  const int64_t plain = activation_bytes(*net, tokens);
  net->recompute_layers(true);
  const int64_t full = activation_bytes(*net, tokens);
  net->recompute_layers(false);
  const int64_t hidden = 128 * 384 * 4;
  // Inputs of six layers; what the last norm and the projection after it save; the logits' softmax; generators.
  EXPECT_LT(full, 9 * hidden + 128 * 256 * 4 + 6 * 5120 + 4096);
  EXPECT_GT(plain, 100 * hidden);
  const SelectiveRecompute scope({.keep = {}, .extra_compute = 0.11});
  EXPECT_LT(activation_bytes(*net, tokens), 2 * plain / 5);
}

TEST(RecomputeConfigured, SelectiveActsOnTheEnginesOwnModel) {
  for (const auto& [stage, gather] : {std::pair{0, GatherPolicy::kAuto}, std::pair{3, GatherPolicy::kCopy}})
    run_ranks(2, [stage = stage, gather = gather](Rank& rank) {
      at::set_num_threads(1);
      const auto first = make_net("Llama"), second = make_net("Llama"), plain = make_net("Llama");
      Config config = default_config(rank.size());
      config.optimizer = {.kind = OptimizerKind::kAdamW, .lr = 1e-2};
      config.pager.stage = stage;
      config.pager.gather = gather;
      config.recompute.mode = RecomputeMode::kSelective;
      Engine engine(rank.world(), *first, {.config = config});
      config.recompute.selective.keep = {"silu"};
      Engine other(rank.world(), *second, {.config = config});
      const auto tokens = at::randint(11, {2, 8}, at::kLong);
      const auto runs_of_silu = [&](LanguageModel& net) {
        const testing::CountOf silu("aten::silu");
        net.loss(tokens, tokens).backward();
        return silu.count;
      };
      EXPECT_EQ(runs_of_silu(*first), 6);  // one per layer, each twice
      EXPECT_EQ(runs_of_silu(*second), 3);
      EXPECT_EQ(runs_of_silu(*plain), 3);
      other.destroy();
      engine.destroy();
    });
}

TEST(RecomputeConfigured, FullIsRefusedWhereNobodyOffersIt) {
  run_ranks(1, [](Rank& rank) {
    torch::nn::Linear net(3, 3);
    Config config = default_config(1);
    config.recompute.mode = RecomputeMode::kFull;
    EXPECT_THROW(Engine(rank.world(), *net, {.config = config}), ConfigError);
  });
}

}  // namespace
}  // namespace trireme
