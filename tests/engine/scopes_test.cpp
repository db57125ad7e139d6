// Where gradients are reduced, who ends a window, and what else a user may do with an engine between two steps.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/engine/model_engine.h"
#include "trireme/pager/init/gathered.h"
#include "trireme/pager/init/init.h"
#include "trireme/recompute/recompute.h"

namespace trireme {
namespace {

using namespace testing;

class Scopes : public ::testing::TestWithParam<Stage> {
 protected:
  static Config config(int world, int64_t accumulation = 1) {
    return with_stage(sgd_config(world, accumulation), GetParam());
  }
};

std::vector<at::Tensor> weights_of(Engine& engine, const TrainedModel& model) {
  engine.destroy();
  return model.module->parameters();
}

void expect_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  for (size_t i = 0; i < a.size(); ++i) EXPECT_TRUE(at::equal(a[i], b[i])) << i;
}

TEST_P(Scopes, CoalescedReductionIsOneAndHappensWhereTheScopeIsClosed) {
  run_ranks(2, [&](Rank& rank) {
    at::set_num_threads(1);
    auto model = make_mlp();
    auto plain = make_mlp();
    Engine engine(rank.world(), *model.module, {.config = config(2, 3)});
    Engine other(rank.world(), *plain.module, {.config = config(2, 3)});
    CoalescedReduction scope = engine.coalesce_grad_reduction();
    for (int64_t micro = 0; micro < 3; ++micro) {
      engine.backward(model.loss({2 * micro + rank.id(), 0}));
      EXPECT_SAYS(error_of<StateError>([&] { engine.step(); }), "inside a coalesce_grad_reduction() scope");
      EXPECT_SAYS(error_of<StateError>([&] { (void)engine.no_sync(); }), "inside another coalesce_grad_reduction()");
      EXPECT_EQ(engine.pager().counters().reduced_bytes, 0);
    }
    scope.close();
    const int64_t reduced = engine.pager().counters().reduced_bytes;
    EXPECT_GT(reduced, 0);
    {
      const NoSync no_sync = other.no_sync();
      for (int64_t micro = 0; micro < 3; ++micro) other.backward(plain.loss({2 * micro + rank.id(), 0}));
    }
    for (int micro = 0; micro < 3; ++micro) engine.step(), other.step();
    EXPECT_EQ(engine.pager().counters().reduced_bytes, reduced);  // nothing was left for the step
    expect_equal(weights_of(engine, model), weights_of(other, plain));
  });
}

TEST_P(Scopes, WithoutCloseTheStepReduces) {
  run_ranks(2, [&](Rank& rank) {
    auto model = make_mlp();
    auto plain = make_mlp();
    Engine engine(rank.world(), *model.module, {.config = config(2)});
    Engine other(rank.world(), *plain.module, {.config = config(2)});
    {
      const CoalescedReduction scope = engine.coalesce_grad_reduction();
      engine.backward(model.loss({rank.id(), 0}));
    }
    engine.step();
    other.backward(plain.loss({rank.id(), 0}));
    other.step();
    expect_equal(weights_of(engine, model), weights_of(other, plain));
  });
}

TEST_P(Scopes, EveryStepUpdatesWhereTheCallerManagesAccumulation) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](Rank& rank) {
      Dot net;
      Config unmanaged = config(ranks, 2);
      unmanaged.managed_gradient_accumulation = false;
      auto engine = initialize(rank.world(), net, {.config = unmanaged});
      for (const int passes : {1, 3}) {
        for (int i = 0; i < passes; ++i) engine.backward(engine(vec(2, 0).to(GetParam().dtype)));
        EXPECT_FALSE(engine.is_gradient_accumulation_boundary());
        engine.step();
        EXPECT_TRUE(engine.was_step_applied());
      }
      EXPECT_SAYS(error_of<StateError>([&] { engine.set_gradient_accumulation_boundary(true); }),
                  "managed_gradient_accumulation=false");
      EXPECT_EQ(engine.global_steps(), 2);
      engine.destroy();
      EXPECT_EQ(values(net->w), (Floats{2 - 0.5f * 4, 3}));  // four gradients of 2, each counted as 1/2
    });
  }
}

TEST_P(Scopes, ASharedLossTrainsEveryEngineThatItReached) {
  run_ranks(2, [&](Rank& rank) {
    auto student = make_mlp();
    auto teacher = make_mlp();
    auto alone = make_mlp();
    Engine first(rank.world(), *student.module, {.config = config(2)});
    Engine second(rank.world(), *teacher.module, {.config = config(2)});
    Engine other(rank.world(), *alone.module, {.config = config(2)});
    for (int64_t step = 0; step < 2; ++step) {
      const MicroBatch batch{2 * step + rank.id(), 0};
      (student.loss(batch) + teacher.loss(batch) * 0.5).backward();
      first.step();
      second.step();
      other.backward(alone.loss(batch));
      other.step();
      if (step > 0) continue;
      EXPECT_NEAR(*second.get_global_grad_norm() / *other.get_global_grad_norm(), 0.5, 1e-3);
    }
    expect_equal(weights_of(first, student), weights_of(other, alone));
    second.destroy();
  });
}

// Programs that DeepSpeed refuses as "gradient computed twice": one graph through the model twice (contrastive), and
// several backward passes in one window.
TEST_P(Scopes, AParameterMayBeReducedTwiceInAWindow) {
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = config(2)});
    const auto loss = [&](float a, float b) { return engine(vec(a, b).to(GetParam().dtype)); };
    engine.backward(loss(1, 0) + loss(0, 1));  // two forward passes in one graph
    const auto r = static_cast<float>(rank.id());
    engine.backward(loss(2 * r, 0));  // and another backward pass of its own
    EXPECT_EQ(values(*safe_get_full_grad(net->w)), (Floats{2, 1}));
    engine.backward(loss(0, 1));  // and one after the gradients were read
    engine.step();
    engine.destroy();
    EXPECT_EQ(values(net->w), (Floats{2 - 0.5f * 2, 3 - 0.5f * 2}));
  });
}

TEST_P(Scopes, GatheredParametersReachMastersAndCheckpoints) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    auto model = make_mlp();
    Engine engine(rank.world(), *model.module, {.config = config(2)});
    const at::Tensor weight = model.module->parameters()[2];
    engine.backward(model.loss({rank.id(), 0}));
    {
      const zero::GatheredParameters whole(*model.module);
      EXPECT_SAYS(error_of<StateError>([&] { engine.step(); }), "step: parameter 'layers.0.weight' is in a Gathered");
      EXPECT_SAYS(error_of<StateError>([&] { engine.destroy(); }), "destroy: parameter 'layers.0.weight' is in");
      engine.save_checkpoint(folder.path(), {.tag = "reading"});
    }
    {
      zero::GatheredParameters whole({weight}, {.modifier_rank = 1});
      if (rank.id() == 1) {
        const torch::NoGradGuard no_grad;
        at::Tensor(weight).fill_(0.375);
      }
      EXPECT_SAYS(error_of<StateError>([&] { engine.save_checkpoint(folder.path()); }),
                  "save_checkpoint: parameter 'layers.2.weight' is in");
      whole.close();
    }
    EXPECT_TRUE(safe_get_full_fp32_param(weight)->eq(0.375).all().item<bool>());
    engine.set_lr(0);
    engine.step();
    EXPECT_TRUE(weight.eq(0.375).all().item<bool>());
    engine.destroy();
  });
}

TEST_P(Scopes, AnEngineMayBeMadeInsideOfAnInitScope) {
  struct WideImpl : torch::nn::Module {
    WideImpl() {
      for (int i = 0; i < 3; ++i) register_module("block" + std::to_string(i), torch::nn::Linear(40, 40));
    }
  };
  run_ranks(2, [&](Rank& rank) {
    std::shared_ptr<WideImpl> net;
    std::unique_ptr<Engine> engine;
    {
      const zero::Init scope(rank.world(), {.smallest_bytes = 64, .live_bytes = 1});
      net = std::make_shared<WideImpl>();
      engine = std::make_unique<Engine>(rank.world(), *net, InitializeOptions{.config = config(2)});
    }
    at::Tensor sum = at::zeros({}, GetParam().dtype);
    for (const at::Tensor& parameter : net->parameters()) sum = sum + parameter.sum();
    engine->backward(sum);
    engine->step();
    EXPECT_TRUE(engine->was_step_applied());
    engine->destroy();
  });
}

/// A contrastive loss through one layer that runs four times, each time recomputed in backward or not.
TrainedModel make_contrastive(bool recomputed) {
  auto layer = std::make_shared<torch::nn::LinearImpl>(6, 6);
  draw_weights(*layer);
  const auto run = [layer, recomputed](const at::Tensor& x) {
    const auto forward = [layer](const at::Tensor& input) { return layer->forward(input).tanh(); };
    return recomputed ? recompute(forward, x) : forward(x);
  };
  const auto loss = [layer, run](const MicroBatch& batch) {
    const at::Tensor x = input_of(*layer, batch, {4, 6});
    return (run(run(x)) - run(run(-x))).square().sum();
  };
  return {layer, loss};
}

TEST_P(Scopes, ALayerThatRunsSeveralTimesAndIsRecomputedTrainsAsWithout) {
  run_ranks(2, [&](Rank& rank) {
    at::set_num_threads(1);
    auto model = make_contrastive(true);
    auto plain = make_contrastive(false);
    Engine engine(rank.world(), *model.module, {.config = config(2, 2)});
    Engine other(rank.world(), *plain.module, {.config = config(2, 2)});
    for (int64_t micro = 0; micro < 4; ++micro) {
      const MicroBatch batch{2 * micro + rank.id(), micro};
      engine.backward(model.loss(batch));
      engine.step();
      other.backward(plain.loss(batch));
      other.step();
    }
    const std::vector<at::Tensor> trained = weights_of(engine, model);
    expect_equal(trained, weights_of(other, plain));
    EXPECT_FALSE(at::equal(trained[0], make_contrastive(false).module->parameters()[0].to(GetParam().dtype)));
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Scopes, ::testing::ValuesIn(all_stages()), name_of_stage);

TEST(EngineStates, AreOnTheHostWhichIsSaidOnce) {
  std::vector<std::string> said;
  const LogSink former = set_log_sink([&](LogLevel, const std::string& text) { said.push_back(text); });
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1)});
    said.clear();
    engine.offload_states();
    engine.offload_states({.include = {"optim_states", "lp_grads"}});
    engine.reload_states();
    EXPECT_EQ(said.size(), 1U);
    EXPECT_SAYS(said.at(0), "in host memory already");
    EXPECT_SAYS(
        error_of<ConfigError>([&] { engine.offload_states({.include = {"weights"}}); }),
        "include has 'weights'; use 'optim_states', 'hp_params', 'lp_params', 'lp_grads', 'contiguous_grad_buffer'");
    EXPECT_SAYS(error_of<ConfigError>([&] { engine.offload_states({.device = "nvme"}); }), "device='nvme'");
    Dot other;
    auto evaluator = initialize(rank.world(), other);
    EXPECT_SAYS(error_of<StateError>([&] { evaluator.offload_states(); }), "no optimizer is configured");
  });
  set_log_sink(former);
}

TEST(EngineCache, IsEmptyAfterEmptyPartitionCache) {
  run_ranks(2, [](Rank& rank) {
    auto model = make_mlp();
    const Stage copy{"", 3, GatherPolicy::kCopy, at::kFloat};
    Engine engine(rank.world(), *model.module, {.config = with_stage(sgd_config(2), copy)});
    const at::Tensor before = model.loss({0, 0});
    EXPECT_GT(engine.pager().memory().live_bytes, 0);
    engine.empty_partition_cache();
    EXPECT_EQ(engine.pager().memory().live_bytes, 0);
    EXPECT_TRUE(at::equal(model.loss({0, 0}), before));
  });
}

TEST(ModelEngine, SetsItsModulesMode) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(1)});
    engine.eval();
    EXPECT_FALSE(net->is_training());
    engine.train();
    EXPECT_TRUE(net->is_training());
  });
}

}  // namespace
}  // namespace trireme
