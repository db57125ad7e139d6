// Hyperparameters by group and by schedule, as an engine applies them.
#include <torch/nn/module.h>

#include "tests/engine/dot.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

/// forward(x) = weight . x + bias . x: both gradients are x.
struct AffineImpl : torch::nn::Module {
  AffineImpl() {
    weight = register_parameter("weight", torch::tensor({2.0f, 3.0f}));
    bias = register_parameter("bias", torch::tensor({2.0f, 3.0f}));
  }
  at::Tensor forward(const at::Tensor& x) { return (weight * x).sum() + (bias * x).sum(); }
  at::Tensor weight, bias;
};
TORCH_MODULE(Affine);

template <class Net>
void train_step(ModelEngine<Net>& engine) {
  engine.backward(engine(vec(1, 1)));
  engine.step();
}

const std::vector<ParameterGroup> kBiasAlone = {{.patterns = {"bias$"}, .lr = 0.25, .weight_decay = 0.0}};

TEST(EngineParameterGroups, AreUpdatedWithTheirOwnHyperparametersAtEveryStage) {
  for (const int world : {1, 2})
    for (int stage = 0; stage <= 3; ++stage)
      run_ranks(world, [&](Rank& rank) {
        Affine net;
        Config config = sgd_config(world);
        config.optimizer->weight_decay = 1;
        config.pager.stage = stage;
        auto engine = initialize(rank.world(), net, {.config = config, .parameter_groups = kBiasAlone});
        EXPECT_EQ(engine.group_count(), 2);
        EXPECT_EQ(engine.get_lr(0), 0.5);
        EXPECT_EQ(engine.get_lr(1), 0.25);
        train_step(engine);
        EXPECT_EQ(values(net->weight), (Floats{2 - 0.5 * 3, 3 - 0.5 * 4})) << "stage " << stage;
        EXPECT_EQ(values(net->bias), (Floats{1.75, 2.75})) << "stage " << stage;
        engine.destroy();
      });
}

TEST(EngineParameterGroups, AreScaledByTheScheduleAndSetOneByOne) {
  run_ranks(1, [](Rank& rank) {
    Affine net;
    Config config = sgd_config(1);
    config.scheduler = LrScheduleOptions{.kind = LrScheduleKind::kLinear, .warmup_num_steps = 0, .total_num_steps = 4};
    auto engine = initialize(rank.world(), net, {.config = config, .parameter_groups = kBiasAlone});
    train_step(engine);
    EXPECT_DOUBLE_EQ(engine.get_lr(0), 0.5 * 3 / 4);
    EXPECT_DOUBLE_EQ(engine.get_lr(1), 0.25 * 3 / 4);
    engine.set_lr(0.125, 1);
    EXPECT_DOUBLE_EQ(engine.get_lr(0), 0.5 * 3 / 4);
    EXPECT_EQ(engine.get_lr(1), 0.125);
    engine.set_lr(1);
    EXPECT_EQ(engine.get_lr(0), 1);
    EXPECT_EQ(engine.get_lr(1), 1);
    const std::string missing = ": there is no parameter group 2; use one of the 2, counted from 0";
    EXPECT_SAYS(error_of<ConfigError>([&] { (void)engine.get_lr(2); }), "get_lr" + missing);
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.set_lr(1, 2); }), "set_lr" + missing);
    EXPECT_SAYS(error_of<ConfigError>([&] { (void)engine.get_mom(2); }), "get_mom" + missing);
  });
}

TEST(EngineParameterGroups, TakeAllHyperparametersForTheNextStep) {
  run_ranks(2, [](Rank& rank) {
    Affine net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2), .parameter_groups = kBiasAlone});
    OptimizerOptions options = engine.hyperparameters(1);
    EXPECT_EQ(options.lr, 0.25);
    options.lr = 0.5;
    options.weight_decay = 1;
    engine.set_hyperparameters(options, 1);
    train_step(engine);
    EXPECT_EQ(values(net->weight), (Floats{1.5, 2.5}));
    EXPECT_EQ(values(net->bias), (Floats{2 - 0.5 * 3, 3 - 0.5 * 4}));
    options.lr = -1;
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.set_hyperparameters(options, 1); }), "lr");
    options.kind = OptimizerKind::kAdamW;
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.set_hyperparameters(options, 1); }),
                "set_hyperparameters: group 1 is updated by SGD, not by AdamW");
    EXPECT_SAYS(error_of<ConfigError>([&] { (void)engine.hyperparameters(2); }), "there is no parameter group 2");
    EXPECT_EQ(engine.get_lr(1), 0.5);
  });
}

TEST(EngineParameterGroups, RefuseAMomentumThatComesTooLateForItsBuffer) {
  run_ranks(1, [](Rank& rank) {
    Affine net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1), .parameter_groups = kBiasAlone});
    OptimizerOptions options = engine.hyperparameters(1);
    options.momentum = 0.5;
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.set_hyperparameters(options, 1); }),
                "group 1 began with momentum=0, so it has no momentum buffer, and now momentum=0.5");
    train_step(engine);
  });
}

TEST(EngineParameterGroups, HaveNesterovOfTheirOwn) {
  run_ranks(1, [](Rank& rank) {
    Affine net;
    Config config = sgd_config(1);
    config.optimizer->momentum = 0.5;
    auto groups = kBiasAlone;
    groups[0].nesterov = true;
    auto engine = initialize(rank.world(), net, {.config = config, .parameter_groups = groups});
    train_step(engine);
    EXPECT_EQ(values(net->weight), (Floats{1.5, 2.5}));
    EXPECT_EQ(values(net->bias), (Floats{2 - 0.25 * 1.5, 3 - 0.25 * 1.5}));  // g + 0.5 * buffer, both of them 1
  });
}

TEST(EngineParameterGroups, KeepTheirLearningRatesInACheckpoint) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Affine net, other_net, ungrouped_net;
    const InitializeOptions options{.config = sgd_config(1), .parameter_groups = kBiasAlone};
    auto engine = initialize(rank.world(), net, options);
    engine.set_lr(0.125, 1);
    engine.save_checkpoint(folder.path());
    auto other = initialize(rank.world(), other_net, options);
    other.load_checkpoint(folder.path());
    EXPECT_EQ(other.get_lr(0), 0.5);
    EXPECT_EQ(other.get_lr(1), 0.125);
    auto ungrouped = initialize(rank.world(), ungrouped_net, {.config = sgd_config(1)});
    ungrouped.load_checkpoint(folder.path());
    EXPECT_EQ(ungrouped.get_lr(), 0.5);
  });
}

TEST(EngineParameterGroups, ComeBackFromACheckpointWithAllTheirHyperparameters) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Affine net, other_net, weights_net;
    InitializeOptions options{.config = sgd_config(1), .parameter_groups = kBiasAlone};
    std::get<Config>(options.config).optimizer->momentum = 0.875;
    auto engine = initialize(rank.world(), net, options);
    OptimizerOptions changed = engine.hyperparameters(1);
    changed.lr = 0.125;
    changed.momentum = 0.25;
    changed.weight_decay = 0.0625;
    changed.nesterov = true;
    engine.set_hyperparameters(changed, 1);
    engine.save_checkpoint(folder.path());

    auto other = initialize(rank.world(), other_net, options);
    other.load_checkpoint(folder.path(), {.load_lr_scheduler_states = false});
    OptimizerOptions with_own_rate = changed;
    with_own_rate.lr = other.get_lr(1);
    EXPECT_EQ(other.hyperparameters(1), with_own_rate);
    other.load_checkpoint(folder.path());
    EXPECT_EQ(other.hyperparameters(1), changed);
    EXPECT_EQ(other.hyperparameters(0), engine.hyperparameters(0));

    auto weights = initialize(rank.world(), weights_net, options);
    weights.load_checkpoint(folder.path(), {.load_optimizer_states = false});
    EXPECT_EQ(weights.hyperparameters(1).momentum, 0.875);
  });
}

TEST(EngineSchedule, OfOneCycleMovesTheMomentumOfTheNextStep) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Dot net, other_net;
    Config config = sgd_config(1);
    config.optimizer->momentum = 0.875;
    config.scheduler = LrScheduleOptions{.kind = LrScheduleKind::kOneCycle,
                                         .one_cycle = {.cycle_min_lr = 1,
                                                       .cycle_max_lr = 2,
                                                       .cycle_first_step_size = 2,
                                                       .cycle_min_mom = 0.25,
                                                       .cycle_max_mom = 0.75}};
    auto engine = initialize(rank.world(), net, {.config = config});
    EXPECT_EQ(engine.get_mom().first, 0.75);
    train_step(engine);  // w = (2, 3) - 1 * (1, 1), momentum buffer (1, 1)
    EXPECT_EQ(engine.get_mom().first, 0.5);
    EXPECT_EQ(engine.get_lr(), 1.5);
    train_step(engine);  // w = (1, 2) - 1.5 * (0.5 * 1 + 1)
    EXPECT_EQ(values(net->w), (Floats{-1.25, -0.25}));
    engine.save_checkpoint(folder.path());
    auto other = initialize(rank.world(), other_net, {.config = config});
    other.load_checkpoint(folder.path());
    EXPECT_EQ(other.get_mom().first, 0.25);
  });
}

}  // namespace
}  // namespace trireme
