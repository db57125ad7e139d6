// Masters, optimizer states and gradients of single parameters: whole and in parts, read and written, at every stage.
#include "trireme/access/parameter_access.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

class SafeAccess : public ::testing::TestWithParam<Stage> {
 protected:
  static Config config(int world, int64_t accumulation = 1) {
    Config config = sgd_config(world, accumulation);
    config.optimizer = OptimizerOptions{.lr = 0.25, .weight_decay = 0.1};
    return with_stage(config, GetParam());
  }
};

/// The gradient of one plain process: the mean over `batches`, summed in fp32.
at::Tensor mean_gradient(TrainedModel& model, int parameter, const std::vector<int64_t>& batches) {
  at::Tensor sum;
  for (const int64_t batch : batches) {
    model.loss({batch, 0}).backward();
    const at::Tensor gradient = model.module->parameters()[parameter].grad().to(at::kFloat);
    sum = sum.defined() ? sum + gradient : gradient.clone();
    model.module->zero_grad();
  }
  return sum / static_cast<double>(batches.size());
}

TEST_P(SafeAccess, GradientsAreTheMeanOfTheWindowSoFarAndTheWindowGoesOn) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](Rank& rank) {
      at::set_num_threads(1);
      auto plain = make_mlp();
      plain.module->to(GetParam().dtype);
      auto model = make_mlp();
      auto untouched = make_mlp();
      Engine engine(rank.world(), *model.module, {.config = config(ranks, 2)});
      Engine other(rank.world(), *untouched.module, {.config = config(ranks, 2)});
      std::vector<int64_t> batches;
      for (int64_t micro = 0; micro < 2; ++micro) {
        for (int64_t r = 0; r < ranks; ++r) batches.push_back(micro * ranks + r);
        engine.backward(model.loss({micro * ranks + rank.id(), 0}));
        other.backward(untouched.loss({micro * ranks + rank.id(), 0}));
        for (const int i : {0, 1, 5}) {
          const auto gradient = safe_get_full_grad(model.module->parameters()[i]);
          ASSERT_TRUE(gradient.has_value());
          // The second half of the window is still to come: it counts 1/2.
          const at::Tensor expected = mean_gradient(plain, i, batches) * (micro == 0 ? 0.5 : 1);
          EXPECT_TRUE(at::allclose(*gradient, expected, 1e-4, 1e-6)) << i << " of micro-batch " << micro;
        }
        engine.step();
        other.step();
      }
      EXPECT_TRUE(engine.was_step_applied());
      EXPECT_NEAR(*engine.get_global_grad_norm(), *other.get_global_grad_norm(), 1e-5);
      engine.destroy();
      other.destroy();
      for (size_t i = 0; i < 6; ++i)  // reading in between changes the order of a sum
        EXPECT_TRUE(at::allclose(model.module->parameters()[i], untouched.module->parameters()[i], 1e-4, 1e-6)) << i;
    });
  }
}

TEST_P(SafeAccess, AGradientThatWasReadAtTheEndOfAWindowIsTheOneThatIsTaken) {
  run_ranks(2, [&](Rank& rank) {
    at::set_num_threads(1);
    auto read = make_mlp();
    auto plain = make_mlp();
    Engine engine(rank.world(), *read.module, {.config = config(2)});
    Engine other(rank.world(), *plain.module, {.config = config(2)});
    for (int step = 0; step < 3; ++step) {
      engine.backward(read.loss({2 * step + rank.id(), 0}));
      for (const at::Tensor& parameter : read.module->parameters()) (void)safe_get_full_grad(parameter);
      engine.step();
      other.backward(plain.loss({2 * step + rank.id(), 0}));
      other.step();
      EXPECT_EQ(*engine.get_global_grad_norm(), *other.get_global_grad_norm());
    }
    engine.destroy();
    other.destroy();
    for (size_t i = 0; i < 6; ++i)
      EXPECT_TRUE(at::equal(read.module->parameters()[i], plain.module->parameters()[i])) << i;
  });
}

TEST_P(SafeAccess, GradientsAreWithoutTheLossScale) {
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    Config config = with_stage(sgd_config(2), GetParam());
    config.precision.weight_dtype = at::kHalf;
    config.precision.loss_scale.loss_scale = 1024;
    auto engine = initialize(rank.world(), net, {.config = config});
    engine.backward(engine(vec(1, 2).to(at::kHalf)));
    EXPECT_EQ(values(*safe_get_full_grad(net->w)), (Floats{1, 2}));
    safe_set_full_grad(net->w, vec(3, 4));
    EXPECT_EQ(values(*safe_get_full_grad(net->w)), (Floats{3, 4}));
    engine.step();
    EXPECT_DOUBLE_EQ(*engine.get_global_grad_norm(), 5);
    engine.destroy();
  });
}

TEST_P(SafeAccess, GradientsThatAreSetAreThoseOfTheStep) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](Rank& rank) {
      auto model = make_mlp();
      Config sgd = with_stage(sgd_config(ranks), GetParam());
      Engine engine(rank.world(), *model.module, {.config = sgd});
      const std::vector<at::Tensor> parameters = model.module->parameters();
      const at::Tensor before = parameters[2].detach().clone();
      engine.backward(model.loss({rank.id(), 0}));
      for (const at::Tensor& parameter : parameters) safe_set_full_grad(parameter, at::zeros(parameter.sizes()));
      const at::Tensor wanted = at::arange(before.numel(), at::kFloat).view(before.sizes()) / 512;
      safe_set_full_grad(parameters[2], wanted);
      safe_update_full_grad_vectorized({parameters[2], parameters[4]},
                                       [](const at::Tensor& gradient, const at::Tensor&) { return gradient * 2; });
      EXPECT_TRUE(at::equal(*safe_get_full_grad(parameters[2]), wanted * 2));
      engine.step();
      EXPECT_NEAR(*engine.get_global_grad_norm(), (wanted * 2).norm().item<double>(), 1e-4);
      EXPECT_TRUE(at::allclose(*safe_get_full_fp32_param(parameters[2]), before.to(at::kFloat) - 0.5 * 2 * wanted));
      engine.destroy();
    });
  }
}

TEST_P(SafeAccess, MastersAreReadAndWrittenWithTheirWeights) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](Rank& rank) {
      auto model = make_mlp();
      Engine engine(rank.world(), *model.module, {.config = config(ranks)});
      const at::Tensor weight = model.module->parameters()[2];
      const at::Tensor master = *safe_get_full_fp32_param(weight);
      EXPECT_EQ(master.scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(master.to(weight.scalar_type()), weight));
      const at::Tensor value = at::arange(weight.numel(), at::kFloat).view(weight.sizes()) / 3;
      safe_set_full_fp32_param(weight, value);
      EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(weight), value));  // not rounded
      EXPECT_TRUE(at::equal(weight.detach(), value.to(weight.scalar_type())));
      engine.set_lr(0);
      engine.backward(model.loss({rank.id(), 0}));
      engine.step();
      EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(weight), value));
      engine.destroy();
      EXPECT_TRUE(at::equal(weight.detach(), value.to(weight.scalar_type())));
    });
  }
}

TEST_P(SafeAccess, WhatAUserWroteIsTheMaster) {
  run_ranks(2, [&](Rank& rank) {
    auto model = make_mlp();
    Engine engine(rank.world(), *model.module, {.config = config(2)});
    const at::Tensor weight = model.module->parameters()[3];
    {
      const torch::NoGradGuard no_grad;
      at::Tensor(weight).fill_(0.75);
    }
    EXPECT_TRUE(safe_get_full_fp32_param(weight)->eq(0.75).all().item<bool>());
  });
}

TEST_P(SafeAccess, OptimizerStatesAreThoseOfTheMoments) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](Rank& rank) {
      auto model = make_mlp();
      Config adam = config(ranks);
      adam.optimizer->beta1 = 0.5;
      Engine engine(rank.world(), *model.module, {.config = adam});
      const at::Tensor weight = model.module->parameters()[2];
      EXPECT_TRUE(safe_get_full_optimizer_state(weight, "exp_avg")->eq(0).all().item<bool>());
      engine.backward(model.loss({rank.id(), 0}));
      const at::Tensor gradient = *safe_get_full_grad(weight);
      engine.step();
      EXPECT_TRUE(at::equal(*safe_get_full_optimizer_state(weight, "exp_avg"), gradient * 0.5));
      const at::Tensor value = at::arange(weight.numel(), at::kFloat).view(weight.sizes());
      safe_set_full_optimizer_state(weight, value, "exp_avg_sq");
      EXPECT_TRUE(at::equal(*safe_get_full_optimizer_state(weight, "exp_avg_sq"), value));
    });
  }
}

TEST_P(SafeAccess, LocalPartsOfAllRanksMakeTheWhole) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](Rank& rank) {
      auto model = make_mlp();
      Engine engine(rank.world(), *model.module, {.config = config(ranks)});
      const at::Tensor weight = model.module->parameters()[2];
      engine.backward(model.loss({rank.id(), 0}));
      const at::Tensor gradient = *safe_get_local_grad(weight);
      const at::Tensor master = *safe_get_local_fp32_param(weight);
      const at::Tensor moment = *safe_get_local_optimizer_state(weight, "exp_avg");
      const int64_t numel = master.numel();
      EXPECT_EQ(gradient.numel(), numel);
      EXPECT_EQ(moment.numel(), numel);
      at::Tensor all = at::full({1}, numel);
      rank.world().all_reduce(all).wait();
      EXPECT_EQ(all.item<int64_t>(), GetParam().stage == 0 ? ranks * weight.numel() : weight.numel());

      const float mine = 1.0f + static_cast<float>(GetParam().stage == 0 ? 0 : rank.id());
      safe_set_local_fp32_param(weight, at::full({numel}, mine));
      safe_set_local_grad(weight, at::full({numel}, mine));
      safe_set_local_optimizer_state(weight, at::full({numel}, mine), "exp_avg");
      const at::Tensor whole = *safe_get_full_fp32_param(weight);
      EXPECT_TRUE(at::equal(*safe_get_full_grad(weight), whole));
      EXPECT_TRUE(at::equal(*safe_get_full_optimizer_state(weight, "exp_avg"), whole));
      EXPECT_TRUE(at::equal(weight.detach().to(at::kFloat), whole));
      EXPECT_EQ(whole.eq(mine).sum().item<int64_t>(), numel);
    });
  }
}

TEST_P(SafeAccess, AFrozenParameterHasNothingAndALoopOverAllGoesOn) {
  run_ranks(2, [&](Rank& rank) {
    auto model = make_tied_net();
    Engine engine(rank.world(), *model.module, {.config = config(2)});
    engine.backward(model.loss({rank.id(), 1}));
    size_t frozen = 0;
    for (const auto& item : model.module->named_parameters()) {
      const at::Tensor& parameter = item.value();
      const bool trained = parameter.requires_grad();
      frozen += trained ? 0 : 1;
      const bool used = trained && !item.key().starts_with("unused.") && !item.key().starts_with("rare.");
      EXPECT_EQ(safe_get_full_fp32_param(parameter).has_value(), trained) << item.key();
      EXPECT_EQ(safe_get_full_optimizer_state(parameter, "exp_avg").has_value(), trained) << item.key();
      EXPECT_EQ(safe_get_full_grad(parameter).has_value(), used) << item.key();
      EXPECT_EQ(safe_get_local_fp32_param(parameter).has_value(), trained) << item.key();
      EXPECT_EQ(safe_get_local_optimizer_state(parameter, "exp_avg").has_value(), trained) << item.key();
      EXPECT_EQ(safe_get_local_grad(parameter).has_value(), used) << item.key();
    }
    EXPECT_GT(frozen, 0);
    size_t updated = 0;
    safe_update_full_grad_vectorized(model.module->parameters(), [&](const at::Tensor& gradient, const at::Tensor& p) {
      updated += p.requires_grad() ? 1 : 100;
      return gradient * 0;
    });
    EXPECT_GT(updated, 0);
    EXPECT_LT(updated, 100);
    engine.step();
    EXPECT_EQ(*engine.get_global_grad_norm(), 0);
    engine.destroy();
  });
}

TEST_P(SafeAccess, GradientsWhereNothingIsReducedAreTheSumOfThisRank) {
  for (const bool deterministic : {false, true}) {
    run_ranks(2, [&](Rank& rank) {
      Dot net;
      Config config = with_stage(sgd_config(2, 4), GetParam());
      config.pager.deterministic = deterministic;
      auto engine = initialize(rank.world(), net, {.config = config});
      const auto train = [&](float a, float b) { engine.backward(engine(vec(a, b).to(GetParam().dtype))); };
      const float mine = static_cast<float>(rank.id()) * 4;
      {
        const NoSync no_sync = engine.no_sync();
        EXPECT_FALSE(safe_get_full_grad(net->w).has_value());
        train(mine, 4);
        EXPECT_EQ(values(*safe_get_full_grad(net->w)), (Floats{mine / 4, 1}));
        train(8, mine);
        EXPECT_EQ(values(*safe_get_full_grad(net->w)), (Floats{mine / 4 + 2, mine / 4 + 1}));
      }
      {
        CoalescedReduction scope = engine.coalesce_grad_reduction();
        train(4, 4);
        EXPECT_EQ(values(*safe_get_full_grad(net->w)), (Floats{mine / 4 + 3, mine / 4 + 2}));
        if (!deterministic) {
          scope.close();
          EXPECT_EQ(values(*safe_get_full_grad(net->w)), (Floats{3.5, 2.5}));  // the mean over both ranks
        }
      }
      if (!deterministic) {
        const NoSync no_sync = engine.no_sync();
        EXPECT_FALSE(safe_get_full_grad(net->w).has_value());  // all is reduced
        train(mine, 0);
        EXPECT_EQ(values(*safe_get_full_grad(net->w)), (Floats{mine / 4, 0}));
      }
      for (int micro = 0; micro < 4; ++micro) engine.step();
      engine.destroy();
      // A half of the mean gradient, which is (4, 2.5) with the last backward pass and (3.5, 2.5) without it.
      EXPECT_EQ(values(net->w), (Floats{2 - 0.5f * (deterministic ? 3.5f : 4.0f), 3 - 0.5f * 2.5f}));
    });
  }
}

TEST_P(SafeAccess, SaysWhatIsWrongByName) {
  run_ranks(1, [&](Rank& rank) {
    auto model = make_tied_net();
    Engine engine(rank.world(), *model.module, {.config = config(1)});
    const auto named = model.module->named_parameters();
    const at::Tensor weight = named["twice.weight"];
    const at::Tensor square = at::zeros({8, 8});
    EXPECT_SAYS(error_of<StateError>([&] {
                  safe_get_full_fp32_param(at::ones({2, 3}));
                }),
                "safe_get_full_fp32_param: the tensor [2, 3] belongs to no engine");
    EXPECT_SAYS(error_of<StateError>([&] { safe_set_full_fp32_param(named["frozen.bias"], at::zeros({8})); }),
                "parameter 'frozen.bias' is frozen");
    EXPECT_SAYS(error_of<StateError>([&] { safe_set_local_grad(named["frozen.bias"], at::zeros({8})); }),
                "parameter 'frozen.bias' is frozen");
    EXPECT_SAYS(error_of<ConfigError>([&] { safe_get_full_optimizer_state(weight, "momentum"); }),
                "parameter 'twice.weight' has no optimizer state 'momentum'; it has 'exp_avg', 'exp_avg_sq'");
    EXPECT_SAYS(error_of<ShapeError>([&] { safe_set_full_fp32_param(weight, at::zeros({64})); }),
                "parameter 'twice.weight' has the shape [8, 8], got a value of [64]");
    EXPECT_SAYS(error_of<ShapeError>([&] { safe_get_full_fp32_param(weight.view(-1)); }),
                "expected parameter "
                "'twice.weight' itself");
    EXPECT_SAYS(error_of<ShapeError>([&] { safe_set_local_optimizer_state(weight, at::zeros({3}), "exp_avg"); }),
                "this rank holds 64 elements of parameter 'twice.weight', got a value of shape [3]");
    EXPECT_SAYS(error_of<StateError>([&] { safe_get_full_grad(weight); }), "between backward() and step()");
    engine.backward(model.loss({0, 1}));
    EXPECT_TRUE(safe_get_full_grad(weight).has_value());
    EXPECT_FALSE(safe_get_full_grad(named["unused.weight"]).has_value());
    EXPECT_SAYS(error_of<StateError>([&] { safe_set_full_grad(named["unused.weight"], square); }),
                "parameter 'unused.weight' got no gradient on any rank");
    engine.step();
    EXPECT_SAYS(error_of<StateError>([&] { safe_get_full_grad(weight); }), "between backward() and step()");
    engine.backward(model.loss({0, 1}));
    {
      const NoSync no_sync = engine.no_sync();
      EXPECT_SAYS(error_of<StateError>([&] { safe_get_local_grad(weight); }), "in which nothing is reduced");
      EXPECT_SAYS(error_of<StateError>([&] { safe_set_full_grad(weight, square); }), "in which nothing is reduced");
    }
    engine.destroy();
    EXPECT_SAYS(error_of<StateError>([&] { safe_get_full_fp32_param(weight); }), "belongs to no engine");
    auto bare = make_mlp();
    Engine evaluator(rank.world(), *bare.module);
    EXPECT_SAYS(error_of<StateError>([&] { safe_get_full_fp32_param(bare.module->parameters()[0]); }),
                "the engine of parameter 'layers.0.weight' has no optimizer");
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, SafeAccess, ::testing::ValuesIn(all_stages()), name_of_stage);

}  // namespace
}  // namespace trireme
