// Promises of the engine's methods, on one rank and on two.
#include "trireme/engine/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/support/captured_log.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

TEST(EngineStep, AveragesGradientsOverRanksAndMicroBatches) {
  run_ranks(2, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2, 2)});
    const auto r = static_cast<float>(rank.id());
    EXPECT_FALSE(engine.is_gradient_accumulation_boundary());
    engine.backward(engine(vec(1 + r, 0)));
    engine.step();
    EXPECT_FALSE(engine.was_step_applied());
    EXPECT_EQ(engine.was_step_applied_if_known(), false);
    EXPECT_TRUE(engine.is_gradient_accumulation_boundary());
    engine.backward(engine(vec(0, 4 * r)));
    engine.step();
    EXPECT_TRUE(engine.was_step_applied());
    EXPECT_EQ(engine.was_step_applied_if_known(), true);
    // Mean of (1,0) (2,0) (0,0) (0,4) is (0.75, 1); times lr 0.5.
    EXPECT_EQ(values(net->w), (Floats{2 - 0.375f, 3 - 0.5f}));
    EXPECT_DOUBLE_EQ(*engine.get_global_grad_norm(), 1.25);
    EXPECT_EQ(engine.global_steps(), 1);
    EXPECT_EQ(engine.micro_steps(), 2);
    EXPECT_EQ(engine.global_samples(), 4);
  });
}

TEST(EngineBackward, ReturnsTheLossDividedByTheAccumulationSteps) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1, 4)});
    const at::Tensor scaled = engine.backward(engine(vec(1, 1)));
    EXPECT_FLOAT_EQ(scaled.item<float>(), 1.25);
    EXPECT_FALSE(scaled.requires_grad());
    EXPECT_FLOAT_EQ(engine.backward(engine(vec(1, 1)), {.scale_wrt_gas = false}).item<float>(), 5);
  });
}

TEST(EngineBackward, CalledOnTheLossItselfGivesTheSameGradients) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1, 2)});
    engine.scale(engine(vec(2, 0))).backward();
    engine.step();
    engine.backward(engine(vec(0, 1)) * 2 / 2);
    engine.step();
    EXPECT_EQ(values(net->w), (Floats{2 - 0.5f, 3 - 0.25f}));
  });
}

TEST(EngineBackward, OfALossThatIsDividedAlreadyDoesNotDivideAgain) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1, 2)});
    for (int i = 0; i < 2; ++i) {
      engine.backward(engine(vec(2, 0)) / 2, {.scale_wrt_gas = false});
      engine.step();
    }
    EXPECT_EQ(values(net->w), (Floats{1, 3}));
  });
}

TEST(EngineBackward, TwiceThroughOneGraphAddsUp) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1)});
    const at::Tensor loss = engine(vec(1, 2));
    engine.backward(loss, {.retain_graph = true});
    engine.backward(loss);
    engine.step();
    EXPECT_EQ(values(net->w), (Floats{1, 1}));
  });
}

TEST(EngineStep, ClipsByTheGlobalNorm) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    Config config = sgd_config(1);
    config.gradient_clipping = 1;
    auto engine = initialize(rank.world(), net, {.config = config});
    engine.backward(engine(vec(3, 4)));
    engine.step();
    EXPECT_DOUBLE_EQ(*engine.get_global_grad_norm(), 5);
    EXPECT_NEAR(values(net->w)[0], 2 - 0.5 * 3 / 5, 1e-6);
    EXPECT_NEAR(values(net->w)[1], 3 - 0.5 * 4 / 5, 1e-6);
  });
}

TEST(EngineStep, IsSkippedOnAllRanksWhenOneGradientIsNotFinite) {
  const CapturedLog log;
  run_ranks(2, [](Rank& rank) {
    Dot net;
    Config config = sgd_config(2);
    config.scheduler = LrScheduleOptions{.kind = LrScheduleKind::kWarmup,
                                         .warmup_min_lr = 0.5,
                                         .warmup_max_lr = 0.7,
                                         .warmup_num_steps = 2,
                                         .warmup_type = WarmupKind::kLinear};
    auto engine = initialize(rank.world(), net, {.config = config});
    const float infinity = std::numeric_limits<float>::infinity();
    engine.backward(engine(vec(rank.id() == 1 ? infinity : 1, 1)));
    engine.step();
    EXPECT_FALSE(engine.was_step_applied());
    EXPECT_EQ(engine.skipped_steps(), 1);
    EXPECT_EQ(engine.global_steps(), 1);
    EXPECT_EQ(*engine.get_global_grad_norm(), -1);
    EXPECT_EQ(values(net->w), (Floats{2, 3}));
    for (int i = 0; i < 2; ++i) {
      EXPECT_DOUBLE_EQ(engine.get_lr(), 0.5);  // a skipped step does not advance the schedule
      engine.backward(engine(vec(1, 1)));
      engine.step();
    }
    EXPECT_DOUBLE_EQ(engine.get_lr(), 0.6);
    EXPECT_EQ(values(net->w), (Floats{1, 2}));
  });
  EXPECT_SAYS(log.text(), "warning step 1 changed nothing: a gradient is not finite (1 such so far)");
  EXPECT_EQ(log.text().find("changed nothing"), log.text().rfind("changed nothing"));  // rank 0 says it for all
}

TEST(EngineStep, LeavesAParameterWithoutGradientAloneOrNamesIt) {
  run_ranks(1, [](Rank& rank) {
    for (const bool ignore : {true, false}) {
      auto net = std::make_shared<testing::TiedNetImpl>();
      Config config = sgd_config(1);
      config.optimizer->weight_decay = 0.1;
      config.ignore_unused_parameters = ignore;
      Engine engine(rank.world(), *net, {.config = config});
      const Floats before = values(net->unused->weight);
      engine.backward(net->forward(at::zeros({2}, at::kLong), {}).sum());
      if (ignore) {
        engine.step();
        EXPECT_EQ(values(net->unused->weight), before);
      } else {
        EXPECT_SAYS(error_of<StateError>([&] { engine.step(); }), "parameter 'unused.weight' got no gradient");
      }
    }
  });
}

TEST(EngineStep, KeepsBuffersOfAllRanksAtRankZeros) {
  run_ranks(2, [](Rank& rank) {
    auto model = testing::make_conv_net();
    auto& norm = *std::dynamic_pointer_cast<testing::ConvNetImpl>(model.module)->norm;
    Engine engine(rank.world(), *model.module, {.config = sgd_config(2)});
    engine.backward(model.loss({rank.id(), 0}));
    const at::Tensor mine = norm.running_mean.clone();
    engine.step();
    at::Tensor rank_0s = mine.clone();
    rank.world().broadcast(rank_0s, 0).wait();
    EXPECT_EQ(at::equal(mine, rank_0s), rank.id() == 0);
    EXPECT_TRUE(at::equal(norm.running_mean, rank_0s));
  });
}

TEST(EngineZeroGrad, DropsTheGradientsOfTheWindow) {
  run_ranks(2, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2)});
    engine.backward(engine(vec(100, 100)));
    engine.zero_grad();
    engine.backward(engine(vec(1, 0)));
    engine.step();
    EXPECT_EQ(values(net->w), (Floats{1.5, 3}));
  });
}

TEST(EngineErrors, NameTheCallAndTheFix) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1)});
    EXPECT_SAYS(error_of<ShapeError>([&] { engine.backward(net->w * 2); }),
                "backward: expected a floating scalar loss, got fp32 of shape [2]");
    EXPECT_SAYS(error_of<ShapeError>([&] { engine.backward(torch::tensor(1.0f)); }), "without grad_fn");
    EXPECT_SAYS(error_of<StateError>([&] { engine.step(); }), "call backward(loss) first");
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.set_lr(-1); }), "set_lr: -1");
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.set_train_batch_size(0); }), "set_train_batch_size: 0");
    engine.destroy();
    EXPECT_SAYS(error_of<StateError>([&] { engine(vec(1, 1)); }), "forward: the engine was destroyed");
    Dot other;
    auto evaluator = initialize(rank.world(), other);
    EXPECT_SAYS(error_of<StateError>([&] { evaluator.backward(evaluator(vec(1, 1))); }),
                "backward: no optimizer is configured");
    EXPECT_SAYS(error_of<StateError>([&] { evaluator.step(); }), "step: no optimizer is configured");
  });
}

TEST(EngineInitialize, RefusesByNameWhatCannotBeManaged) {
  run_ranks(1, [](Rank& rank) {
    const auto refusal = [&](torch::nn::Module& module) {
      return error_of<ConfigError>([&] { Engine engine(rank.world(), module, {.config = sgd_config(1)}); });
    };
    torch::nn::Module shares("shares");
    const at::Tensor base = at::ones({4});
    shares.register_parameter("a", base);
    shares.register_parameter("b", base.view({2, 2}));
    EXPECT_SAYS(refusal(shares), "'a' and 'b' are different tensors over one storage");
    torch::nn::Module integral("integral");
    integral.register_parameter("ids", at::ones({4}, at::kLong), /*requires_grad=*/false);
    EXPECT_SAYS(refusal(integral), "parameter 'ids' is Long");
    torch::nn::Module wide("wide");
    wide.register_parameter("d", at::ones({4}, at::kDouble));
    EXPECT_SAYS(refusal(wide), "parameter 'd' is fp64");
    torch::nn::Module elsewhere("elsewhere");
    elsewhere.register_parameter("m", at::ones({4}, at::TensorOptions().device(at::kMeta)));
    EXPECT_SAYS(refusal(elsewhere), "parameter 'm' is on meta");
    torch::nn::Module frozen("frozen");
    frozen.register_parameter("f", at::ones({4}), /*requires_grad=*/false);
    EXPECT_SAYS(refusal(frozen), "no parameter that requires a gradient");
  });
}

TEST(EngineInitialize, CastsToBf16InTheTensorsThatTheModuleHolds) {
  run_ranks(1, [](Rank& rank) {
    auto model = testing::make_conv_net();
    auto& net = *std::dynamic_pointer_cast<testing::ConvNetImpl>(model.module);
    const at::Tensor held = net.head->weight;
    Config config = sgd_config(1);
    config.precision.weight_dtype = at::kBFloat16;
    config.precision.buffer_dtype = at::kBFloat16;
    Engine engine(rank.world(), net, {.config = config});
    EXPECT_EQ(held.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(held.is_same(net.head->weight));
    EXPECT_EQ(net.norm->running_mean.scalar_type(), at::kBFloat16);
    EXPECT_EQ(net.norm->num_batches_tracked.scalar_type(), at::kLong);
  });
}

TEST(EngineInitialize, WritesTheResolvedConfiguration) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2, 3), .output = folder.path() / "run"});
    rank.world().barrier();
    EXPECT_EQ(read_config(folder.path() / "run" / "resolved_config.json", 2), engine.config());
  });
}

TEST(Engines, TwoTrainSideBySideInOneThread) {
  run_ranks(2, [](Rank& rank) {
    Dot a, b;
    Config sharded = sgd_config(2);
    sharded.pager.stage = 3;
    auto first = initialize(rank.world(), a, {.config = sharded});
    auto second = initialize(rank.world(), b, {.config = sgd_config(2)});
    const at::Tensor loss = first(vec(1, 0)) + second(vec(0, 1));
    loss.backward();
    first.step();
    second.step();
    EXPECT_EQ(values(a->w), (Floats{1.5, 3}));
    EXPECT_EQ(values(b->w), (Floats{2, 2.5}));
    first.destroy();
    EXPECT_EQ(a->w.data_ptr<float>()[0], 1.5);  // plain memory again
  });
}

TEST(Degrees, OtherThanDataAreRefusedByName) {
  run_ranks(2, [](Rank& rank) {
    Dot net;
    const auto refused = [&](const Degrees& degrees) {
      return error_of<ConfigError>([&] { Engine engine(rank.world(), *net, {.degrees = degrees}); });
    };
    EXPECT_SAYS(refused({.expert = 2}), "degrees.expert=2 is not there yet; leave it 1");
    EXPECT_SAYS(refused({.pipe = 2}),
                "degrees.pipe=2, and this engine's ranks have 1 on the axis \"pipe\"; train a "
                "PipelineModule, which cuts a model into stages, or leave it 1");
  });
}

}  // namespace
}  // namespace trireme
