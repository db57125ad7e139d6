// A step function over stages that own parts of an unmodified model: the bits of the same engine without stages.
#include <ATen/ops/equal.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/relu.h>
#include <gtest/gtest.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/captured_log.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/pipeline/step_engine.h"
#include "trireme/recompute/recompute.h"

namespace trireme::testing {
namespace step_engine {

namespace nn = torch::nn;
using at::Tensor;
using Tensors = std::vector<Tensor>;

constexpr int kMicroBatches = 4;

/// Two blocks with a norm's statistics and dropout; `tied`: the head is the first layer's weight.
struct Net : nn::Module {
  explicit Net(bool tied) : is_tied(tied) {
    if (!tied) head = register_module("head", nn::Linear(8, 6));
  }
  nn::Linear first{register_module("first", nn::Linear(6, 8))};
  nn::BatchNorm1d norm{register_module("norm", nn::BatchNorm1d(8))};
  nn::Linear middle{register_module("middle", nn::Linear(8, 8))};
  nn::LayerNorm last{register_module("last", nn::LayerNorm(nn::LayerNormOptions({8})))};
  nn::Linear head{nullptr};
  const bool is_tied;

  Tensor forward(const Tensor& x) {
    Tensor h = at::dropout(at::relu(norm(first(x))), 0.1, is_training());
    h = last(middle(h) + h);
    return is_tied ? at::matmul(h, first->weight) : head(h);
  }
};

int stage_of(const std::string& name) { return name.starts_with("first") || name.starts_with("norm") ? 0 : 1; }

using Configure = std::function<void(Config&)>;

Config config_of(int data, const Configure& configure) {
  Config config;
  config.batch = {.train_batch_size = 3 * kMicroBatches * data,
                  .train_micro_batch_size_per_gpu = 3,
                  .gradient_accumulation_steps = kMicroBatches};
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 0.01};
  config.gradient_clipping = 0.5;
  configure(config);
  return config;
}

Configure zero(int stage, GatherPolicy gather = GatherPolicy::kAuto, bool deterministic = false) {
  return [=](Config& config) {
    config.pager.stage = stage;
    config.pager.gather = gather;
    config.pager.deterministic = deterministic;
  };
}

struct Trained {
  std::map<std::string, Tensor> tensors;
  std::vector<double> losses, norms;
  std::string pipeline;
};

/// Three steps over `stages` stages beside `data` data-parallel ranks.
Trained train(int stages, int data, bool tied, const Configure& configure, const StepRunnerOptions& step = {}) {
  Trained trained;
  std::mutex mutex;
  run_ranks(stages * data, [&](Rank& rank) {
    manual_seed(3);
    Net net(tied);
    StepEngine engine(rank.world(), Topology({{"pipe", stages}, {"data", data}}), net, stage_of, step,
                      {.config = config_of(data, configure)});
    const int place = engine.topology().position_of(rank.id(), "data");
    for (int number = 0; number < 3; ++number) {
      const auto outputs = engine.step(kMicroBatches, [&](int micro_batch) {
        at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(100 * number + 10 * micro_batch + place);
        const Tensor x = at::randn({3, 6}, generator).to(engine.config().precision.weight_dtype);
        const Tensor loss = at::mse_loss(net.forward(x), x);
        engine.backward(loss);
        return Tensors{loss};
      });
      engine.update();
      double loss = 0;
      for (const Tensors& of_micro_batch : outputs) loss += of_micro_batch.at(0).item<double>();
      if (rank.id() == 0) trained.losses.push_back(loss);
      if (rank.id() == 0) trained.norms.push_back(*engine.get_global_grad_norm());
    }
    std::map<std::string, Tensor> own;
    for (size_t i = 0; i < engine.pager().parameters().size(); ++i)
      own[engine.pager().parameters()[i].name] = engine.pager().whole(static_cast<int>(i)).detach().clone();
    for (const auto& item : engine.module().named_buffers()) own[item.key()] = item.value().clone();
    const std::lock_guard lock(mutex);
    if (place == 0) trained.tensors.insert(own.begin(), own.end());
    if (rank.id() == 0) trained.pipeline = engine.runner().pipeline();
    engine.destroy();
  });
  return trained;
}

void expect_same(const Trained& found, const Trained& expected) {
  EXPECT_EQ(found.losses, expected.losses);
  ASSERT_EQ(found.tensors.size(), expected.tensors.size());
  for (const auto& [name, tensor] : expected.tensors) EXPECT_TRUE(at::equal(found.tensors.at(name), tensor)) << name;
}

struct Case {
  const char* name;
  Configure configure;
  bool may_take_turns = true;
};

class Stages : public ::testing::TestWithParam<Case> {};

TEST_P(Stages, TrainAsTheEngineWithoutThem) {
  for (const bool tied : {false, true}) {
    const Trained expected = train(1, 2, tied, GetParam().configure);
    const Trained found = train(2, 2, tied, GetParam().configure);
    EXPECT_EQ(found.pipeline, tied && !GetParam().may_take_turns ? "sequential" : "interleaved");
    expect_same(found, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(Zero, Stages,
                         ::testing::Values(Case{"0", zero(0)}, Case{"1", zero(1)}, Case{"2", zero(2)},
                                           Case{"3Shared", zero(3, GatherPolicy::kShared)},
                                           Case{"3Copy", zero(3, GatherPolicy::kCopy), false},
                                           Case{"3Deterministic", zero(3, GatherPolicy::kCopy, true), false}),
                         [](const auto& info) { return std::string(info.param.name); });

Configure precision(const std::function<void(PrecisionOptions&)>& choose) {
  return [choose](Config& config) {
    config.pager.stage = 2;
    choose(config.precision);
  };
}

INSTANTIATE_TEST_SUITE_P(Precision, Stages,
                         ::testing::Values(Case{"Bf16", precision([](PrecisionOptions& options) {
                                                  options.weight_dtype = at::kBFloat16;
                                                  options.buffer_dtype = at::kBFloat16;
                                                })},
                                           Case{"Fp16", precision([](PrecisionOptions& options) {
                                                  options.weight_dtype = at::kHalf;
                                                  options.buffer_dtype = at::kHalf;
                                                })},
                                           Case{"Autocast", precision([](PrecisionOptions& options) {
                                                  options.autocast.enabled = true;
                                                })}),
                         [](const auto& info) { return std::string(info.param.name); });

/// The weights of all stages after a step of an engine that has loaded `folder`, or after two that were saved there.
std::map<std::string, Tensor> saved_or_loaded(int stages, const std::filesystem::path& folder, bool saves) {
  std::map<std::string, Tensor> all;
  std::mutex mutex;
  run_ranks(stages, [&](Rank& rank) {
    manual_seed(saves ? 3 : 4);
    Net net(true);
    net.eval();
    StepEngine engine(rank.world(), Topology({{"pipe", stages}, {"data", 1}}), net, stage_of, {},
                      {.config = config_of(1, [](Config&) {})});
    if (!saves) (void)engine.load_checkpoint(folder);
    for (int number = saves ? 0 : 1; number < 2; ++number) {
      (void)engine.step(kMicroBatches, [&](int micro_batch) {
        const Tensor x = at::full({3, 6}, 0.1 * (1 + micro_batch + number)) * at::arange(6);
        const Tensor loss = at::mse_loss(net.forward(x), x);
        engine.backward(loss);
        return Tensors{loss};
      });
      engine.update();
      if (saves && number == 0) (void)engine.save_checkpoint(folder);
    }
    const std::lock_guard lock(mutex);
    for (size_t i = 0; i < engine.pager().parameters().size(); ++i)
      all[engine.pager().parameters()[i].name] = engine.pager().whole(static_cast<int>(i)).detach().clone();
    for (const auto& item : engine.module().named_buffers()) all[item.key()] = item.value().clone();
    engine.destroy();
  });
  return all;
}

// Momenta too: a step after the load ends where the run that was saved ends.
TEST(Stages, LoadACheckpointOfOtherStages) {
  const TemporaryFolder folder;
  for (const int from : {1, 2}) {
    const auto place = folder / str("of-", from);
    const auto saved = saved_or_loaded(from, place, /*saves=*/true);
    for (const int to : {1, 2}) {
      const auto loaded = saved_or_loaded(to, place, /*saves=*/false);
      ASSERT_EQ(loaded.size(), saved.size());
      for (const auto& [name, tensor] : saved)
        EXPECT_TRUE(at::equal(loaded.at(name), tensor)) << name << " of " << from << " on " << to;
    }
  }
}

TEST(Stages, RefuseWhatTheyCannotDo) {
  run_ranks(4, [](Rank& rank) {
    const auto error = [&](const Topology& topology, const Configure& configure) {
      Net net(false);
      return error_of([&] {
        const StepEngine engine(rank.world(), topology, net, stage_of, {}, {.config = config_of(1, configure)});
      });
    };
    EXPECT_SAYS(error(Topology({{"pipe", 2}, {"data", 2}}),
                      [](Config& config) {
                        config.batch.train_batch_size *= 2;
                        config.recompute.mode = RecomputeMode::kFull;
                      }),
                "`trireme.recompute` = \"full\": a step function over 2 stages does not run layers again yet");
    EXPECT_SAYS(
        error(Topology({{"pipe", 2}, {"data", 1}, {"tensor", 2}}), [](Config& config) { config.degrees.tensor = 2; }),
        "axes \"pipe\" of 2 and \"tensor\" of 2 ranks: stages of a step function take the sizes of whole layers");
  });
}

// Its replay would draw by another generator than the forward pass, whose operators have seeds of their own.
TEST(Stages, RefuseARecomputationThatDraws) {
  for (const int stages : {1, 2})
    run_ranks(stages, [&](Rank& rank) {
      Net net(false);
      StepEngine engine(rank.world(), Topology({{"pipe", stages}, {"data", 1}}), net, stage_of, {},
                        {.config = config_of(1, [](Config&) {})});
      const std::string text = error_of([&] {
        (void)engine.step(1, [&](int) {
          const Tensor h =
              recompute([&](const Tensor& x) { return at::dropout(net.first(x), 0.5, true).exp(); }, at::ones({3, 6}));
          const Tensor loss = net.last(h).sum();
          engine.backward(loss);
          return Tensors{loss};
        });
      });
      EXPECT_SAYS(text, "smp: aten::dropout draws random numbers in a backward pass");
    });
}

TEST(Stages, RecomputeWhatIsTheirsAlone) {
  const auto train = [](bool recomputes, bool of_both) {
    Tensor weight;
    run_ranks(2, [&](Rank& rank) {
      manual_seed(3);
      Net net(false);
      StepEngine engine(rank.world(), Topology({{"pipe", 2}, {"data", 1}}), net, stage_of, {},
                        {.config = config_of(1, [](Config&) {})});
      (void)engine.step(1, [&](int) {
        const auto part = [&](const Tensor& x) {
          const Tensor h = at::dropout(net.first(x), 0.5, false).exp();
          return of_both ? net.middle(h) : h;
        };
        const Tensor h = recomputes ? recompute(part, at::ones({3, 6})) : part(at::ones({3, 6}));
        const Tensor loss = net.last(h).square().mean();
        engine.backward(loss);
        return Tensors{loss};
      });
      engine.update();
      if (rank.id() == 0) weight = engine.pager().whole(0).detach().clone();
    });
    return weight;
  };
  EXPECT_TRUE(at::equal(train(true, false), train(false, false)));
  EXPECT_SAYS(error_of([&] { (void)train(true, true); }),
              "a part of a step function that runs again in the backward pass");
}

TEST(Stages, OfEachSchedule) {
  const Trained expected = train(1, 1, false, zero(0));
  for (const std::string pipeline : {"interleaved", "simple", "sequential"})
    expect_same(train(2, 1, false, zero(0), {.pipeline = pipeline}), expected);
}

}  // namespace step_engine
}  // namespace trireme::testing
