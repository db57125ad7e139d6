// torch_autocast: the forward under CPU autocast, with paged weights, and what travels in its dtype.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>

#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/captured_log.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/engine/model_engine.h"
#include "trireme/precision/autocast.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int64_t kSteps = 3;
constexpr int64_t kAccumulation = 2;

/// Two linear layers of which the second runs twice: autocast casts its weight once and takes the copy from its cache.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(9, 8));
    twice = register_module("twice", torch::nn::Linear(8, 8));
    draw_weights(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return twice(torch::tanh(twice(torch::tanh(first(x))))); }
  torch::nn::Linear first{nullptr}, twice{nullptr};
};
TORCH_MODULE(Net);

at::Tensor input_of_round(int64_t number) { return at::randn({4, 9}, generator_of({number})); }
at::Tensor loss_of(const at::Tensor& output) { return output.to(at::kFloat).square().sum(); }

/// Autocast as libtorch's own programs use it.
class PlainAutocast {
 public:
  PlainAutocast() {
    at::autocast::increment_nesting();
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  }
  ~PlainAutocast() {
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::decrement_nesting();
    at::autocast::clear_cache();
  }
  PlainAutocast(const PlainAutocast&) = delete;
  PlainAutocast& operator=(const PlainAutocast&) = delete;
};

/// Plain libtorch on one process: gradients of two micro-batches averaged, SGD with lr 0.5.
std::vector<at::Tensor> plain_weights() {
  Net net;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5));
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t i = 0; i < kAccumulation; ++i) {
      at::Tensor output;
      {
        const PlainAutocast autocast;
        output = net(input_of_round(step * kAccumulation + i));
      }
      loss_of(output).backward();
    }
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().mul_(0.5);
    optimizer.step();
  }
  return net->parameters();
}

Config autocast_config(const PagerPolicy& policy, at::ScalarType dtype, int world) {
  Config config = sgd_config(world, kAccumulation);
  config.batch = {4 * kAccumulation * world, 4, kAccumulation};
  config.pager = policy;
  // Sums of two micro-batches would be rounded on their way, at some stages after both, at others after each.
  config.precision.autocast = {.enabled = true, .dtype = dtype, .lower_precision_safe_modules = {}};
  return config;
}

std::vector<at::Tensor> engine_weights(Rank& rank, const Config& config) {
  Net net;
  auto engine = initialize(rank.world(), net, {.config = config});
  for (int64_t i = 0; i < kSteps * kAccumulation; ++i) {
    const at::Tensor output = engine(input_of_round(i));
    EXPECT_EQ(output.scalar_type(), config.precision.autocast.dtype);
    engine.backward(loss_of(output));
    engine.step();
  }
  engine.destroy();
  return net->parameters();
}

void expect_equal(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& expected, const Config& config) {
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_TRUE(at::equal(got[i], expected[i])) << "stage " << config.pager.stage << ", parameter " << i << ": "
                                                << (got[i] - expected[i]).abs().max().item<double>();
}

TEST(Autocast, TrainsLikeLibtorchUnderEveryStageAndPolicy) {
  at::set_num_threads(1);
  run_ranks(1, [](Rank& rank) {
    const std::vector<at::Tensor> expected = plain_weights();
    for (const auto& [stage, policy] : kZeroStages) {
      const Config config = autocast_config(policy, at::kBFloat16, 1);
      expect_equal(engine_weights(rank, config), expected, config);
    }
  });
}

TEST(Autocast, OfFp16ScalesTheLoss) {
  at::set_num_threads(1);
  run_ranks(1, [](Rank& rank) {
    for (const auto& [stage, policy] : kZeroStages) {
      Config config = autocast_config(policy, at::kHalf, 1);
      config.precision.loss_scale.initial_scale_power = 6;
      Net net;
      auto engine = initialize(rank.world(), net, {.config = config});
      EXPECT_EQ(engine.loss_scale(), 64);
      EXPECT_THROW(loss_of(engine(input_of_round(0))).backward(), StateError);
      engine.destroy();
      // Under either scale no gradient of this little model leaves fp16's normal range: the same bits in the end.
      Config twice = config;
      twice.precision.loss_scale.initial_scale_power = 7;
      expect_equal(engine_weights(rank, config), engine_weights(rank, twice), config);
    }
  });
}

TEST(Autocast, OfTheProgramAroundTheEngineNeverShowsStaleWeights) {
  at::set_num_threads(1);
  run_ranks(1, [](Rank& rank) {
    const std::vector<at::Tensor> expected = plain_weights();
    const AutocastScope around({.enabled = true, .dtype = at::kHalf});
    const CapturedLog log;
    const Config config = autocast_config({.stage = 3, .gather = GatherPolicy::kCopy}, at::kBFloat16, 1);
    expect_equal(engine_weights(rank, config), expected, config);
    EXPECT_SAYS(log.text(), "info forward: autocast is on around it; inside, torch_autocast's dtype holds, bf16\n");
    EXPECT_EQ(log.text().find("forward:"), log.text().rfind("forward:"));  // once
    EXPECT_TRUE(AutocastScope::is_on());
  });
}

TEST(Autocast, OfTheProgramAroundTheEngineIsOffInsideUnlessConfigured) {
  run_ranks(1, [](Rank& rank) {
    Net net;
    Config config = sgd_config(1);
    config.batch = {4, 4, 1};
    auto engine = initialize(rank.world(), net, {.config = config});
    const AutocastScope around({.enabled = true});
    const CapturedLog log;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(engine(input_of_round(0)).scalar_type(), at::kFloat);
    EXPECT_EQ(
        log.text(),
        "warning forward: autocast is on around it, and torch_autocast.enabled is false: inside, autocast is off. "
        "Set torch_autocast.enabled=true to have it\n");
    EXPECT_TRUE(AutocastScope::is_on());
  });
}

struct SpecialLinearImpl : torch::nn::LinearImpl {
  using torch::nn::LinearImpl::LinearImpl;
};
TORCH_MODULE(SpecialLinear);

TEST(AutocastModules, OfTheListedClassesSendTheirGradientsInItsDtype) {
  const CapturedLog log;
  run_ranks(2, [](Rank& rank) {
    const auto sent_bytes = [&](const std::vector<std::string>& modules) {
      SpecialLinear special(64, 64);
      torch::nn::Linear plain(64, 64);
      torch::nn::Module net("net");
      net.register_module("special", special);
      net.register_module("plain", plain);
      Config config = autocast_config({.stage = 1}, at::kBFloat16, 2);
      config.batch = {2, 1, 1};
      config.precision.autocast.lower_precision_safe_modules = modules;
      Engine engine(rank.world(), net, {.config = config});
      engine.backward(plain(special(at::ones({2, 64}))).sum());
      engine.step();
      return engine.pager().counters().reduced_bytes;
    };
    const int64_t whole = sent_bytes({});
    const int64_t one_layer = whole / 2;
    EXPECT_EQ(sent_bytes({"torch.nn.modules.linear.Linear"}), whole - one_layer / 2);
    EXPECT_EQ(sent_bytes({"Linear", "SpecialLinear"}), whole - one_layer);
    EXPECT_EQ(sent_bytes({"torch.nn.Linaer"}), whole);
  });
  EXPECT_SAYS(log.text(), "the model has no module of class 'Linaer'");
}

TEST(AutocastModules, AreGatheredInItsDtypeWhereAutocastReadsThem) {
  run_ranks(2, [](Rank& rank) {
    torch::nn::Sequential net(torch::nn::Linear(64, 64), torch::nn::LayerNorm(torch::nn::LayerNormOptions({64})));
    draw_weights(*net);
    std::vector<at::Tensor> own;
    for (const at::Tensor& parameter : net->parameters()) own.push_back(parameter.detach().clone());
    Config config = autocast_config({.stage = 3, .gather = GatherPolicy::kCopy, .poison = true}, at::kBFloat16, 2);
    config.precision.autocast.lower_precision_safe_modules = {"Linear"};
    auto engine = initialize(rank.world(), net, {.config = config});
    const auto& linear = net[0]->as<torch::nn::Linear>()->weight;
    const auto& norm = net[1]->as<torch::nn::LayerNorm>()->weight;
    const at::NoGradGuard no_grad;
    engine(at::ones({2, 64}));
    {
      const AutocastScope autocast(config.precision.autocast);
      EXPECT_TRUE(at::equal(linear, own[0].to(at::kBFloat16).to(at::kFloat)));  // still there, rounded
      EXPECT_TRUE(at::equal(norm, own[2]));
    }
    const int64_t gathers = engine.pager().counters().gathers;
    EXPECT_TRUE(at::equal(linear, own[0]));  // gathered again, with its own bits
    EXPECT_EQ(engine.pager().counters().gathers, gathers + 1);
    engine(at::ones({2, 64}));
    EXPECT_EQ(engine.pager().counters().gathers, gathers + 1);  // which serve autocast too
    engine.pager().release_gathered();
    {
      const AutocastScope autocast(config.precision.autocast);
      (void)linear.sum();
      linear.add_(1);  // a write needs the own bits
    }
    EXPECT_TRUE(at::equal(linear, own[0] + 1));
    engine.pager().release_gathered();
    {
      const AutocastScope autocast(config.precision.autocast);
      (void)linear.sum();
      engine.destroy();  // gives back the own bits
    }
    EXPECT_TRUE(at::equal(linear, own[0] + 1));
  });
}

}  // namespace
}  // namespace trireme
