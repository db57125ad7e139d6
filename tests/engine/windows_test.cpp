// Accumulation windows where counts change, and what users write into weights between steps.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"
#include "trireme/pager/init/init.h"

namespace trireme {
namespace {

using namespace testing;

template <class Net>
void train_once(ModelEngine<Net>& engine, float a, float b) {
  engine.backward(engine(vec(a, b)));
  engine.step();
}

TEST(EngineWindow, BeginsAnewAtALoadWithAnotherAccumulation) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Dot saved;
    auto engine = initialize(rank.world(), saved, {.config = sgd_config(1)});
    for (int step = 0; step < 3; ++step) train_once(engine, 0, 0);
    engine.save_checkpoint(folder.path());
    Dot loaded;
    auto other = initialize(rank.world(), loaded, {.config = sgd_config(1, 2)});
    ASSERT_TRUE(other.load_checkpoint(folder.path()).has_value());
    EXPECT_EQ(other.micro_steps(), 3);
    train_once(other, 2, 0);
    EXPECT_FALSE(other.was_step_applied());
    train_once(other, 0, 2);
    EXPECT_TRUE(other.was_step_applied());
    EXPECT_EQ(values(loaded->w), (Floats{1.5, 2.5}));
  });
}

TEST(EngineWindow, MayChangeItsLengthBetweenTwoOfThemOnly) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1)});
    for (int step = 0; step < 3; ++step) train_once(engine, 0, 0);
    engine.set_train_batch_size(4);
    EXPECT_EQ(engine.gradient_accumulation_steps(), 4);
    engine.backward(engine(vec(4, 0)));
    EXPECT_SAYS(error_of<StateError>([&] { engine.set_train_batch_size(1); }), "inside an accumulation window");
    engine.step();
    EXPECT_SAYS(error_of<StateError>([&] { engine.set_train_batch_size(1); }), "inside an accumulation window");
    for (int i = 0; i < 3; ++i) {
      EXPECT_FALSE(engine.was_step_applied());
      train_once(engine, 0, 4);
    }
    EXPECT_TRUE(engine.was_step_applied());
    EXPECT_EQ(values(net->w), (Floats{1.5, 1.5}));
  });
}

TEST(EngineWindow, BeginsAnewAfterAStepThatFailed) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1, 2)});
    engine.step();
    EXPECT_SAYS(error_of<StateError>([&] { engine.step(); }), "call backward(loss) first");
    train_once(engine, 2, 0);
    EXPECT_FALSE(engine.was_step_applied());
    train_once(engine, 2, 0);
    EXPECT_TRUE(engine.was_step_applied());
    EXPECT_EQ(values(net->w), (Floats{1, 3}));
  });
}

TEST(EngineWindow, EndsWhereTheUserSays) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1, 2)});
    engine.set_gradient_accumulation_boundary(false);
    for (int i = 0; i < 3; ++i) {
      train_once(engine, 2, 0);
      EXPECT_FALSE(engine.was_step_applied());
      EXPECT_FALSE(engine.is_gradient_accumulation_boundary());
    }
    engine.set_gradient_accumulation_boundary(true);
    EXPECT_TRUE(engine.is_gradient_accumulation_boundary());
    train_once(engine, 2, 0);
    EXPECT_TRUE(engine.was_step_applied());
    EXPECT_EQ(engine.global_steps(), 1);
    EXPECT_EQ(engine.micro_steps(), 4);
    EXPECT_EQ(values(net->w), (Floats{0, 3}));  // four gradients of 2, each half: 2 - 0.5 * 4
  });
}

TEST(EngineBatch, FollowsTheMicroBatch) {
  run_ranks(2, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2, 3)});
    engine.set_train_micro_batch_size(5);
    EXPECT_EQ(engine.get_batch_info(), (BatchSizes{30, 5, 3}));
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.set_train_micro_batch_size(0); }), "0 is no batch size");
    engine.backward(engine(vec(1, 1)));
    EXPECT_SAYS(error_of<StateError>([&] { engine.set_train_micro_batch_size(1); }), "inside an accumulation window");
    EXPECT_EQ(engine.train_micro_batch_size_per_gpu(), 5);
  });
}

TEST(EngineMomentum, IsThatOfTheOptimizer) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    Config config = sgd_config(1);
    config.optimizer->momentum = 0.75;
    auto engine = initialize(rank.world(), net, {.config = config});
    EXPECT_EQ(engine.get_mom(), (std::pair<double, double>{0.75, 0}));
    Dot other_net;
    config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .beta1 = 0.5, .beta2 = 0.25};
    auto other = initialize(rank.world(), other_net, {.config = config});
    EXPECT_EQ(other.get_mom(), (std::pair<double, double>{0.5, 0.25}));
  });
}

TEST(EngineNoSync, ReducesOnceAndGivesTheSameStep) {
  for (const int stage : {0, 1, 2, 3}) {
    run_ranks(2, [&](Rank& rank) {
      Dot net;
      Config config = sgd_config(2, 4);
      config.pager.stage = stage;
      auto engine = initialize(rank.world(), net, {.config = config});
      for (int micro = 0; micro < 3; ++micro) {
        const NoSync no_sync = engine.no_sync();
        engine.backward(engine(vec(4, static_cast<float>(rank.id()))));
        EXPECT_SAYS(error_of<StateError>([&] { const NoSync second = engine.no_sync(); }),
                    "inside another no_sync() scope");
        EXPECT_SAYS(error_of<StateError>([&] { engine.step(); }), "inside a no_sync() scope");
      }
      for (int micro = 0; micro < 3; ++micro) engine.step();
      EXPECT_EQ(engine.pager().counters().reduced_bytes, 0);
      train_once(engine, 0, 0);
      EXPECT_TRUE(engine.was_step_applied());
      // Two gradients at ZeRO stage 3, else their unit with its padding.
      EXPECT_EQ(engine.pager().counters().reduced_bytes, stage == 3 ? 8 : 256) << "stage " << stage;
      // The mean over 2 x 4 micro-batches: (3, 3/8).
      engine.destroy();
      EXPECT_EQ(values(net->w), (Floats{0.5, 3 - 0.5f * 3 / 8})) << "stage " << stage;
    });
  }
}

TEST(EngineStep, IsSkippedInFp32WhateverBf16SaysOfOverflows) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    Config config = sgd_config(1);
    config.precision.check_grad_overflow = false;
    auto engine = initialize(rank.world(), net, {.config = config});
    train_once(engine, std::numeric_limits<float>::quiet_NaN(), 1);
    EXPECT_FALSE(engine.was_step_applied());
    EXPECT_EQ(values(net->w), (Floats{2, 3}));
  });
}

TEST(EngineStep, NamesAParameterThatWasFrozenAtInitialize) {
  run_ranks(1, [](Rank& rank) {
    auto model = make_mlp();
    at::Tensor first = model.module->parameters()[0];
    first.set_requires_grad(false);
    Engine engine(rank.world(), *model.module, {.config = sgd_config(1)});
    first.set_requires_grad(true);
    engine.backward(model.loss({}));
    EXPECT_SAYS(error_of<StateError>([&] { engine.step(); }), "parameter 'layers.0.weight' was frozen when");
  });
}

class UserWrites : public ::testing::TestWithParam<Stage> {
 protected:
  static Config config(int world, double lr) {
    Config config = with_stage(sgd_config(world), GetParam());
    config.optimizer->lr = lr;
    return config;
  }
};

TEST_P(UserWrites, AreSavedWithTheNextCheckpoint) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    at::set_num_threads(1);
    auto model = make_mlp();
    Engine engine(rank.world(), *model.module, {.config = config(2, 0.1)});
    const auto train = [&](Engine& trained, TrainedModel& of, int64_t round) {
      trained.backward(of.loss({round * 2 + rank.id(), round}));
      trained.step();
    };
    train(engine, model, 0);
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : model.module->parameters()) parameter.clamp_(-0.1, 0.1);
    }
    engine.save_checkpoint(folder.path());

    auto again = make_mlp();
    Engine other(rank.world(), *again.module, {.config = config(2, 0.1)});
    ASSERT_TRUE(other.load_checkpoint(folder.path()).has_value());
    for (const at::Tensor& parameter : again.module->parameters())
      EXPECT_LE(parameter.detach().abs().max().item<float>(), 0.1005f);
    train(engine, model, 1);
    train(other, again, 1);
    engine.destroy();
    other.destroy();
    for (size_t i = 0; i < model.module->parameters().size(); ++i)
      EXPECT_TRUE(at::equal(model.module->parameters()[i], again.module->parameters()[i])) << i;
  });
}

TEST_P(UserWrites, OfOneElementLeaveTheOthersTheirMasters) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = config(1, 1.0 / 512)});
    for (int step = 0; step < 8; ++step) {
      train_once(engine, 0, 1);  // 1/512 is far below the 1/64 that separates bf16 weights near 3
      const torch::NoGradGuard no_grad;
      net->w.select(0, 0).fill_(2 + step);
    }
    EXPECT_EQ(values(net->w), (Floats{9, 3 - 8.0f / 512}));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, UserWrites,
                         ::testing::Values(Stage{"Stage0Bf16", 0, GatherPolicy::kAuto, at::kBFloat16},
                                           Stage{"Stage2Bf16", 2, GatherPolicy::kAuto, at::kBFloat16},
                                           Stage{"Stage3SharedFp32", 3, GatherPolicy::kShared, at::kFloat},
                                           Stage{"Stage3SharedBf16", 3, GatherPolicy::kShared, at::kBFloat16},
                                           Stage{"Stage3CopyBf16", 3, GatherPolicy::kCopy, at::kBFloat16}),
                         name_of_stage);

class InitThenInitialize : public ::testing::TestWithParam<Stage> {};

TEST_P(InitThenInitialize, TakesOverShardedParametersAndBuffers) {
  struct NetImpl : torch::nn::Module {
    NetImpl() {
      for (int i = 0; i < 4; ++i) {
        register_module("block" + std::to_string(i), torch::nn::Linear(40, 40));
        register_buffer("table" + std::to_string(i), at::full({1600}, i + 1));
      }
    }
  };
  run_ranks(2, [](Rank& rank) {
    manual_seed(4);
    const NetImpl plain;
    manual_seed(4);
    auto net = [&] {
      const zero::Init scope(rank.world(), {.smallest_bytes = 64, .live_bytes = 1});
      return std::make_shared<NetImpl>();
    }();
    Engine engine(rank.world(), *net, {.config = with_stage(sgd_config(2), GetParam())});
    engine.destroy();
    const auto parameters = plain.named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), parameters[item.key()].to(GetParam().dtype))) << item.key();
    const auto buffers = plain.named_buffers();
    for (const auto& item : net->named_buffers())
      EXPECT_TRUE(at::equal(item.value(), buffers[item.key()].to(item.value().scalar_type()))) << item.key();
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, InitThenInitialize,
                         ::testing::Values(Stage{"Stage1Fp32", 1, GatherPolicy::kAuto, at::kFloat},
                                           Stage{"Stage3SharedBf16", 3, GatherPolicy::kShared, at::kBFloat16},
                                           Stage{"Stage3CopyFp32", 3, GatherPolicy::kCopy, at::kFloat},
                                           Stage{"Stage3CopyBf16", 3, GatherPolicy::kCopy, at::kBFloat16}),
                         name_of_stage);

}  // namespace
}  // namespace trireme
