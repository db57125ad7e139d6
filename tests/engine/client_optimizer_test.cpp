// Optimizers that the program brings, over shards.
#include <torch/nn/module.h>
#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <stdexcept>

#include "tests/engine/dot.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int kClientSteps = 50;

/// Gradients are the inputs; `late` gets none before step 3.
struct WideImpl : torch::nn::Module {
  WideImpl() {
    at::Generator generator = at::detail::createCPUGenerator(5);
    w = register_parameter("w", at::randn({37, 9}, generator));
    late = register_parameter("late", at::randn({130}, generator));
  }
  at::Tensor forward(int64_t step) {
    at::Generator generator = at::detail::createCPUGenerator(100 + step);
    const at::Tensor loss = (w * at::randn({37, 9}, generator)).sum();
    return step < 3 ? loss : loss + (late * at::randn({130}, generator)).sum();
  }
  at::Tensor w, late;
};
TORCH_MODULE(Wide);

std::unique_ptr<torch::optim::Optimizer> rmsprop(const std::vector<at::Tensor>& parts,
                                                 const std::vector<std::string>&) {
  return std::make_unique<torch::optim::RMSprop>(
      std::move(parts), torch::optim::RMSpropOptions(0.01).momentum(0.5).weight_decay(0.1).centered(true));
}
std::unique_ptr<torch::optim::Optimizer> adam(const std::vector<at::Tensor>& parts, const std::vector<std::string>&) {
  return std::make_unique<torch::optim::Adam>(std::move(parts), torch::optim::AdamOptions(0.01));
}

Config client_config(int world, int stage) {
  Config config = default_config(world);
  config.batch = {world, 1, 1};
  config.gradient_clipping = 0;
  config.pager.stage = stage;
  return config;
}

void train(ModelEngine<WideImpl>& engine, int64_t from, int64_t to) {
  for (int64_t step = from; step < to; ++step) {
    engine.backward(engine(step));
    engine.step();
  }
}

/// The result of plain libtorch.
Wide trained_alone(const ClientOptimizerFactory& factory) {
  Wide net;
  const auto optimizer = factory(net->parameters(), {});
  for (int64_t step = 0; step < kClientSteps; ++step) {
    optimizer->zero_grad();
    net->forward(step).backward();
    optimizer->step();
  }
  return net;
}

// Some vector kernels round their last, odd elements differently, and parts have other ends than parameters.
void expect_equal(Wide& net, Wide& expected) {
  EXPECT_TRUE(at::allclose(net->w, expected->w, 1e-6, 1e-7));
  EXPECT_TRUE(at::allclose(net->late, expected->late, 1e-6, 1e-7));
}

TEST(ClientOptimizer, TrainsShardsAsItTrainsWholeParameters) {
  for (const ClientOptimizerFactory& factory : {ClientOptimizerFactory(rmsprop), ClientOptimizerFactory(adam)}) {
    Wide expected = trained_alone(factory);
    for (const int world : {1, 2, 4})
      for (int stage = 0; stage <= 3; ++stage)
        run_ranks(world, [&](Rank& rank) {
          Wide net;
          auto engine =
              initialize(rank.world(), net, {.config = client_config(world, stage), .client_optimizer = factory});
          train(engine, 0, kClientSteps);
          engine.destroy();
          expect_equal(net, expected);
        });
  }
}

TEST(ClientOptimizer, ContinuesFromACheckpointAtAnotherNumberOfRanks) {
  for (const ClientOptimizerFactory& factory : {ClientOptimizerFactory(rmsprop), ClientOptimizerFactory(adam)})
    for (const int64_t saved_at : {2, 20}) {  // before `late` has a state, and after
      Wide expected = trained_alone(factory);
      const TemporaryFolder folder;
      run_ranks(2, [&](Rank& rank) {
        Wide net;
        auto engine = initialize(rank.world(), net, {.config = client_config(2, 2), .client_optimizer = factory});
        train(engine, 0, saved_at);
        engine.save_checkpoint(folder.path());
        engine.destroy();
      });
      run_ranks(4, [&](Rank& rank) {
        Wide net;
        auto engine = initialize(rank.world(), net, {.config = client_config(4, 3), .client_optimizer = factory});
        ASSERT_TRUE(engine.load_checkpoint(folder.path()));
        train(engine, saved_at, kClientSteps);
        engine.destroy();
        expect_equal(net, expected);
      });
    }
}

TEST(ClientOptimizer, TakesItsLearningRateFromTheSchedule) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    Config config = client_config(1, 0);
    config.scheduler = LrScheduleOptions{.kind = LrScheduleKind::kLinear, .warmup_num_steps = 0, .total_num_steps = 4};
    const auto sgd = [](const std::vector<at::Tensor>& parts, const std::vector<std::string>&) {
      return std::make_unique<torch::optim::SGD>(std::move(parts), torch::optim::SGDOptions(0.5));
    };
    auto engine = initialize(rank.world(), net, {.config = config, .client_optimizer = sgd});
    EXPECT_EQ(engine.get_lr(), 0.5);
    for (int step = 0; step < 2; ++step) {
      engine.backward(engine(vec(1, 1)));
      engine.step();
    }
    EXPECT_EQ(engine.get_lr(), 0.25);
    EXPECT_EQ(values(net->w), (Floats{2 - 0.5 - 0.375, 3 - 0.5 - 0.375}));
  });
}

std::string refusal_of(const InitializeOptions& options) {
  std::string message;
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    message = error_of<ConfigError>([&] { initialize(rank.world(), net, options); });
  });
  return message;
}

TEST(ClientOptimizer, IsRefusedByNameWhereItCannotBeStepped) {
  const Config config = client_config(1, 0);
  EXPECT_SAYS(refusal_of({.config = sgd_config(1), .client_optimizer = adam}),
              "client_optimizer: the configuration has the optimizer SGD too; remove one of the two");
  EXPECT_SAYS(refusal_of({.config = config, .parameter_groups = {{.patterns = {"w"}}}, .client_optimizer = adam}),
              "parameter_groups: 1 of them beside a client_optimizer");
  const auto lbfgs = [](const std::vector<at::Tensor>& parts, const std::vector<std::string>&) {
    return std::make_unique<torch::optim::LBFGS>(parts);
  };
  EXPECT_SAYS(refusal_of({.config = config, .client_optimizer = lbfgs}), "LBFGS needs a closure");
  const auto other = [](const std::vector<at::Tensor>&, const std::vector<std::string>&) {
    return adam({at::zeros({2})}, {});
  };
  EXPECT_SAYS(refusal_of({.config = config, .client_optimizer = other}),
              "return a torch::optim optimizer of just the tensors that the factory was given");
}

TEST(ClientOptimizer, ThatIsRefusedOnOneRankLeavesTheModelsOfAllAsTheyWere) {
  run_ranks(2, [](Rank& rank) {
    Dot net;
    Config config = client_config(2, 3);
    config.precision.weight_dtype = at::kBFloat16;
    const ClientOptimizerFactory lbfgs = [](const std::vector<at::Tensor>& parts, const std::vector<std::string>&) {
      return std::make_unique<torch::optim::LBFGS>(parts);
    };
    const ClientOptimizerFactory throws = [](const auto&, const auto&) -> std::unique_ptr<torch::optim::Optimizer> {
      throw std::out_of_range("no such group");
    };
    const auto refused = [&](const ClientOptimizerFactory& of_rank_1) {
      const ClientOptimizerFactory& factory = rank.id() == 1 ? of_rank_1 : ClientOptimizerFactory(adam);
      (void)initialize(rank.world(), net, {.config = config, .client_optimizer = factory});
    };
    EXPECT_SAYS(error_of<ConfigError>([&] { refused(lbfgs); }), "LBFGS needs a closure");
    if (rank.id() == 1)
      EXPECT_THROW(refused(throws), std::out_of_range);
    else
      EXPECT_SAYS(error_of<Error>([&] { refused(throws); }), "rank 1: no such group");
    EXPECT_EQ(net->w.scalar_type(), at::kFloat);
    EXPECT_EQ(values(net->w), (Floats{2, 3}));
    net->forward(vec(1, 1)).backward();
    EXPECT_TRUE(net->w.grad().defined());  // no pager takes it
    auto engine = initialize(rank.world(), net, {.config = config, .client_optimizer = adam});
    engine.backward(engine(vec(1, 1)));
    engine.step();
    EXPECT_EQ(engine.global_steps(), 1);
  });
}

/// Keeps one number for the whole tensor.
struct ScalarState : torch::optim::OptimizerCloneableParamState<ScalarState> {
  at::Tensor scale = at::zeros({1});
  void serialize(torch::serialize::OutputArchive& archive) const override {
    archive.write("scale", c10::IValue(scale));
  }
};
struct WithScalarState : torch::optim::Optimizer {
  explicit WithScalarState(std::vector<at::Tensor> parts)
      : Optimizer({torch::optim::OptimizerParamGroup(std::move(parts))},
                  std::make_unique<torch::optim::SGDOptions>(0.5)) {}
  at::Tensor step(LossClosure closure) override {
    for (const at::Tensor& tensor : param_groups()[0].params())
      state_[tensor.unsafeGetTensorImpl()] = std::make_unique<ScalarState>();
    return closure ? closure() : at::Tensor();
  }
};

TEST(ClientOptimizer, WhoseStateIsNotOfTheShardsShapeTrainsButIsNotSaved) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    const auto factory = [](const std::vector<at::Tensor>& parts, const std::vector<std::string>&) {
      return std::make_unique<WithScalarState>(parts);
    };
    auto engine = initialize(rank.world(), net, {.config = client_config(1, 0), .client_optimizer = factory});
    engine.backward(engine(vec(1, 1)));
    engine.step();
    EXPECT_SAYS(error_of<CheckpointError>([&] { engine.save_checkpoint(folder.path()); }),
                "client_optimizer: its state 'scale' of parameter 'w' is a tensor of shape [1]");
  });
}

}  // namespace
}  // namespace trireme
