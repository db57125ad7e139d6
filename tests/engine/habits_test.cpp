// Calls that would change nothing, or count as something else: the program is told once, with the fix. And calls
// that ranks do not make alike.
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <chrono>
#include <string>
#include <thread>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/captured_log.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;
using namespace std::chrono_literals;

size_t count_of(const std::string& text, const std::string& part) {
  size_t count = 0;
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++count;
  return count;
}

TEST(ARankThatForgetsItsBackward, IsToldOnceThatItCountsAsZero) {
  const CapturedLog log;
  run_ranks(2, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2)});
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = engine(vec(2, 0));
      if (rank.id() == 0 || step == 0) loss.backward();
      engine.step();
    }
    EXPECT_EQ(values(net->w), (Floats{0, 3}));  // 2 - 0.5 * (2 + 1 + 1)
  });
  EXPECT_EQ(count_of(log.text(), "warning step: rank 1 had no backward pass since its last step()"), 1) << log.text();
  EXPECT_EQ(count_of(log.text(), "warning"), 1) << log.text();
}

TEST(AnOptimizerBesideTheEngine, IsToldOnceThatItChangesNothing) {
  const CapturedLog log;
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1)});
    torch::optim::SGD beside(net->parameters(), /*lr=*/0.5);
    for (int step = 0; step < 30; ++step) {
      beside.zero_grad();
      engine(vec(1, 1)).backward();
      beside.step();
    }
    EXPECT_EQ(values(net->w), (Floats{2, 3}));
  });
  EXPECT_EQ(count_of(log.text(), "call step() of the engine after each backward()"), 1) << log.text();
}

TEST(AnOptimizerBesideTheEngine, ChangesNothingWhereTheEngineSteps) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1)});
    torch::optim::SGD beside(net->parameters(), torch::optim::SGDOptions(8).momentum(0.5).weight_decay(0.5));
    for (int step = 0; step < 2; ++step) {
      beside.zero_grad();
      engine.backward(engine(vec(1, 1)));
      beside.step();
      engine.step();
      beside.step();
    }
    EXPECT_EQ(values(net->w), (Floats{1, 2}));  // the engine's rate is 0.5
  });
}

TEST(SeveralBackwardPassesBeforeAStep, AreNotToldOf) {
  const CapturedLog log;
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1, 4)});
    for (int step = 0; step < 20; ++step) {
      for (int loss = 0; loss < 3; ++loss) engine.backward(engine(vec(0.01, 0.01)));
      engine.step();
    }
  });
  EXPECT_EQ(count_of(log.text(), "warning"), 0) << log.text();
}

TEST(ABatchThatIsNotTheMicroBatch, IsToldOnceUnlessItIsTheLastOfAnEpoch) {
  const auto told_of = [](const std::vector<int64_t>& batches) {
    const CapturedLog log;
    run_ranks(1, [&](Rank& rank) {
      torch::nn::Linear net(3, 2);
      Config config = sgd_config(1);
      config.batch = {4, 4, 1};
      auto engine = initialize(rank.world(), net, {.config = config});
      for (const int64_t batch : batches) {
        engine.backward(engine(at::zeros({batch, 3})).sum());
        engine.step();
      }
    });
    return log.text();
  };
  EXPECT_EQ(count_of(told_of({4, 4, 4, 2, 4, 4, 4, 2}), "warning"), 0);
  const std::string larger = told_of({8, 8, 8});
  EXPECT_EQ(count_of(larger, "warning"), 1) << larger;
  EXPECT_SAYS(larger, "forward: an input of shape [8, 3] has 8 samples, and train_micro_batch_size_per_gpu is 4");
  EXPECT_SAYS(larger, "set train_micro_batch_size_per_gpu to 8");
  EXPECT_EQ(count_of(told_of({2, 2, 2, 2}), "has 2 samples"), 1);
}

TEST(GlobalSamples, CountTheMicroBatchesThatCameWhereTheProgramAccumulates) {
  run_ranks(2, [](Rank& rank) {
    Dot net;
    Config config = sgd_config(2);
    config.batch = {2 * 4 * 3, 4, 3};
    config.managed_gradient_accumulation = false;
    auto engine = initialize(rank.world(), net, {.config = config});
    for (int pass = 0; pass < 2; ++pass) engine.backward(engine(vec(1, 1)));
    engine.step();
    EXPECT_EQ(engine.global_samples(), 2 * 4 * 2);
    for (int pass = 0; pass < 5; ++pass) engine(vec(1, 1)).backward();
    engine.step();
    EXPECT_EQ(engine.global_samples(), 2 * 4 * 7);
  });
}

/// SGD whose second step fails.
class Failing final : public torch::optim::SGD {
 public:
  using torch::optim::SGD::SGD;
  at::Tensor step(LossClosure closure) override {
    if (++steps_ == 2) throw std::runtime_error("the second step fails");
    return torch::optim::SGD::step(std::move(closure));
  }

 private:
  int steps_ = 0;
};

class AFailedStep : public ::testing::TestWithParam<Stage> {};

TEST_P(AFailedStep, LeavesNoGradientToTheNextOne) {
  run_ranks(2, [](Rank& rank) {
    Dot net;
    Config config = with_stage(sgd_config(2), GetParam());
    config.optimizer.reset();
    const auto make = [](const std::vector<at::Tensor>& parts, const std::vector<std::string>&) {
      return std::make_unique<Failing>(parts, torch::optim::SGDOptions(0.5));
    };
    auto engine = initialize(rank.world(), net, {.config = config, .client_optimizer = make});
    const auto train = [&](float first) {
      engine.backward(engine(vec(first, 0).to(GetParam().dtype)));
      engine.step();
    };
    train(1);
    EXPECT_SAYS(error_of<std::runtime_error>([&] { train(100); }), "the second step fails");
    EXPECT_EQ(engine.global_steps(), 1);
    train(1);
    EXPECT_EQ(values(net->w), (Floats{1, 3}));  // 2 - 0.5 - 0.5
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, AFailedStep, ::testing::ValuesIn(all_stages()), name_of_stage);

TEST(ARefusedInitialize, LeavesTheModelAsItWas) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    net->w.mutable_grad() = vec(4, 5);
    const auto refuse = [&](const std::function<void(Config&, InitializeOptions&)>& change) {
      InitializeOptions options;
      Config config = sgd_config(1);
      config.precision.weight_dtype = at::kBFloat16;
      change(config, options);
      options.config = config;
      (void)error_of<ConfigError>([&] { initialize(rank.world(), net, options); });
      EXPECT_EQ(net->w.scalar_type(), at::kFloat);
      EXPECT_TRUE(net->w.grad().defined());
      EXPECT_EQ(values(net->w), (Floats{2, 3}));
    };
    refuse([](Config&, InitializeOptions& options) { options.parameter_groups = {{.patterns = {"bias"}, .lr = 1}}; });
    refuse([](Config& config, InitializeOptions&) { config.leaf_modules.names = {"experts"}; });
    refuse([](Config& config, InitializeOptions&) {
      config.scheduler =
          LrScheduleOptions{.kind = LrScheduleKind::kLinear, .warmup_num_steps = 9, .total_num_steps = 3};
    });
    refuse([](Config& config, InitializeOptions&) { config.recompute.mode = RecomputeMode::kFull; });
    net->w.set_requires_grad(false);
    refuse([](Config&, InitializeOptions&) {});
  });
}

TEST(ConfigurationsThatDifferByRank, AreRefusedOnEveryRankByTheFirstKeyThatDoes) {
  run_ranks(2, [](Rank& rank) {
    Dot net;
    Config config = sgd_config(2);
    config.gradient_clipping = rank.id() == 0 ? 0.5 : 1.0;
    EXPECT_SAYS(
        error_of<ConfigError>([&] { initialize(rank.world(), net, {.config = config}); }),
        "configurations differ, first in `gradient_clipping = 0.5` on rank 0 and `gradient_clipping = 1.0` on rank "
        "1; give every rank the same");
  });
}

TEST(ModelsThatDifferByRank, AreRefusedOnEveryRankByTheFirstParameterThatDoes) {
  const auto refusals = [](const std::function<void(torch::nn::Module&, int)>& change) {
    std::vector<std::string> texts(2);
    run_ranks(2, [&](Rank& rank) {
      Dot net;
      change(*net, rank.id());
      texts[rank.id()] = error_of<ConfigError>([&] { initialize(rank.world(), net, {.config = sgd_config(2)}); });
      EXPECT_TRUE(net->w.is_leaf());
    });
    return texts;
  };
  auto texts = refusals([](torch::nn::Module& net, int rank) { net.register_parameter("b", at::zeros({2 + rank})); });
  for (const std::string& text : texts)
    EXPECT_SAYS(text,
                "the ranks' models differ, first in `parameter 'b' [2] fp32` on rank 0 and `parameter 'b' [3] fp32` on "
                "rank 1");
  texts =
      refusals([](torch::nn::Module& net, int rank) { net.register_parameter(rank == 0 ? "b" : "c", at::zeros({2})); });
  EXPECT_SAYS(texts[0], "first in `parameter 'b'");
  texts = refusals([](torch::nn::Module& net, int rank) {
    if (rank == 1) net.register_parameter("more", at::zeros({2}));
  });
  EXPECT_SAYS(texts[0], "`nothing more` on rank 0 and `parameter 'more' [2] fp32` on rank 1");
  texts = refusals([](torch::nn::Module& net, int rank) {
    net.register_buffer("table", at::zeros({2}, rank == 0 ? at::kFloat : at::kDouble));
  });
  EXPECT_SAYS(texts[0], "buffer 'table' [2] fp32");
}

Config config_of(int stage, GatherPolicy gather) {
  Config config = sgd_config(2);
  config.pager.stage = stage;
  config.pager.gather = gather;
  return config;
}

/// The errors of two ranks that run `program`; none of them may come from a timeout.
std::vector<std::string> told(const Config& config, const std::function<void(ModelEngine<DotImpl>&, int)>& program,
                              const RunOptions& options = {}) {
  std::vector<std::string> texts(2);
  run_ranks(
      2,
      [&](Rank& rank) {
        Dot net;
        auto engine = initialize(rank.world(), net, {.config = config});
        const auto begin = std::chrono::steady_clock::now();
        texts[rank.id()] = error_of<CommError>([&] { program(engine, rank.id()); });
        EXPECT_LT(std::chrono::steady_clock::now() - begin, options.timeout / 2);
      },
      options);
  return texts;
}

class ARankWithOneBackwardLess : public ::testing::TestWithParam<RankBackend> {};

TEST_P(ARankWithOneBackwardLess, IsNamedWithBothMethodsAtOnce) {
  for (const auto& [stage, gather] : {std::pair{2, GatherPolicy::kAuto}, std::pair{3, GatherPolicy::kCopy}}) {
    const auto program = [](ModelEngine<DotImpl>& engine, int rank) {
      for (int step = 0; step < 3; ++step) {
        engine.backward(engine(vec(1, 2)));
        if (rank == 0) engine.backward(engine(vec(1, 2)));
        engine.step();
      }
    };
    const auto texts = told(config_of(stage, gather), program, {.backend = GetParam()});
    for (const std::string& text : texts) {
      EXPECT_SAYS(text, " in backward") << stage;
      EXPECT_SAYS(text, " in step") << stage;
    }
    EXPECT_SAYS(texts[0] + texts[1], "() as often as the others") << stage;
  }
}

INSTANTIATE_TEST_SUITE_P(Backends, ARankWithOneBackwardLess,
                         ::testing::Values(RankBackend::kThreads, RankBackend::kC10d));

TEST(ARankThatSavesAlone, IsToldThatEveryRankMustSave) {
  for (const int stage : {1, 2, 3}) {
    const TemporaryFolder folder;
    const auto texts = told(config_of(stage, GatherPolicy::kAuto), [&](ModelEngine<DotImpl>& engine, int rank) {
      if (rank == 0) engine.save_checkpoint(folder.path());
      for (int step = 0; step < 2; ++step) {
        engine.backward(engine(vec(1, 2)));
        engine.step();
      }
    });
    EXPECT_SAYS(texts[0] + texts[1], "every rank must call save_checkpoint() and") << stage;
  }
}

TEST(ARankThatEndsEarlier, IsNamedWithTheCallThatItDidNotMake) {
  std::string text;
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = config_of(2, GatherPolicy::kAuto)});
    for (int step = 0; step < (rank.id() == 0 ? 3 : 2); ++step) {
      const auto train = [&] {
        engine.backward(engine(vec(1, 2)));
        engine.step();
      };
      if (step < 2)
        train();
      else
        text = error_of<CommError>(train);
    }
  });
  EXPECT_SAYS(text, "rank 1");
  EXPECT_SAYS(text, "every rank must call backward(), as often as the others");
}

TEST(AForwardInAnotherThread, SaysThreadWhereParametersAreGathered) {
  run_ranks(2, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = config_of(3, GatherPolicy::kCopy)});
    std::string text, below;
    std::thread([&] {
      text = error_of<StateError>([&] { (void)engine(vec(1, 1)); });
      below = error_of<c10::Error>([&] { (void)net->forward(vec(1, 1)); });
    }).join();
    EXPECT_SAYS(text, "forward: this thread is not the one that called initialize()");
    EXPECT_SAYS(below, "in the thread that called initialize()");
    rank.world().barrier();
  });
}

TEST(AnInputInAnotherDtype, IsToBeCast) {
  run_ranks(1, [](Rank& rank) {
    torch::nn::Linear net(3, 2);
    Config config = sgd_config(1);
    config.precision.weight_dtype = at::kBFloat16;
    auto engine = initialize(rank.world(), net, {.config = config});
    const std::string text = error_of<ShapeError>([&] { (void)engine(at::ones({1, 3})); });
    EXPECT_SAYS(text, "forward: an input is fp32 and the weights are bf16; cast the input");
    EXPECT_EQ(text.find("frame #"), std::string::npos) << text;
    EXPECT_SAYS(error_of<ShapeError>([&] {
                  (void)engine(at::ones({1, 3}, at::kLong));
                }),
                "forward: an input is Long and the weights are bf16; cast the input: input.to(BFloat16)");
  });
}

TEST(ABufferInAnotherDtype, IsNamedWhereTheModuleCannotComputeWithIt) {
  run_ranks(1, [](Rank& rank) {
    auto net = std::make_shared<ConvNetImpl>();
    Config config = sgd_config(1);
    config.precision.weight_dtype = at::kBFloat16;
    auto engine = initialize(rank.world(), net, {.config = config});
    const std::string text = error_of<ShapeError>([&] { (void)engine(at::ones({1, 2, 6, 6}, at::kBFloat16)); });
    EXPECT_SAYS(text, "forward: buffer 'norm.running_mean' is fp32 and the weights are bf16");
    EXPECT_SAYS(text, "set data_types.buffer_dtype=bf16");
  });
}

}  // namespace
}  // namespace trireme
