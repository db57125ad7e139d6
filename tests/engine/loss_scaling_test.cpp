// Gradients whichever way backward is called, in every dtype and at every stage; and fp16's loss scale.
#include <ATen/Parallel.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/captured_log.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

Config scaled_config(const PagerPolicy& policy, at::ScalarType dtype, int world, int64_t accumulation = 1) {
  Config config = sgd_config(world, accumulation);
  config.pager = policy;
  config.precision.weight_dtype = dtype;
  config.precision.loss_scale.initial_scale_power = 8;  // 2^16 times a loss that is in fp16 itself is infinite
  return config;
}

/// Calls backward on `engine` for one micro-batch, whose `output` is to get the gradient `seed`.
using MlpEngine = ModelEngine<MlpImpl>;
struct Way {
  const char* name;
  int64_t accumulation;  ///< steps of a window of two micro-batches
  std::function<void(MlpEngine& engine, const at::Tensor& output, const at::Tensor& seed)> backward;
};

at::Tensor loss_of(const at::Tensor& output, const at::Tensor& seed) {
  return (output.to(at::kFloat) * seed.to(at::kFloat)).sum();
}

// Halves are exact, so that who divides makes no difference.
const std::vector<Way> kWays = {
    {"engine.backward(loss)", 2, [](MlpEngine& e, auto& out, auto& seed) { e.backward(loss_of(out, seed)); }},
    {"engine.scale(loss).backward()", 2,
     [](MlpEngine& e, auto& out, auto& seed) { e.scale(loss_of(out, seed)).backward(); }},
    {"engine.scale(output).backward(seed)", 2,
     [](MlpEngine& e, auto& out, auto& seed) {
       const at::Tensor scaled = e.scale(out);
       scaled.backward(seed.to(scaled.scalar_type()));
     }},
    {"a loss that is divided already", 2,
     [](MlpEngine& e, auto& out, auto& seed) { e.backward(loss_of(out, seed) / 2, {.scale_wrt_gas = false}); }},
    {"by hand, engine.backward(loss / 2)", 1,
     [](MlpEngine& e, auto& out, auto& seed) { e.backward(loss_of(out, seed) / 2); }},
    {"by hand, engine.scale(loss / 2).backward()", 1,
     [](MlpEngine& e, auto& out, auto& seed) { e.scale(loss_of(out, seed) / 2).backward(); }},
};

/// The pager's gradients of this rank at the end of a window of two micro-batches.
std::vector<at::Tensor> gradients_of(Rank& rank, const PagerPolicy& policy, at::ScalarType dtype, const Way& way) {
  Mlp net;
  Config config = scaled_config(policy, dtype, rank.size(), way.accumulation);
  MlpEngine engine(rank.world(), *net, {.config = config});
  for (int64_t i = 0; i < 2; ++i) {
    const MicroBatch batch{i * rank.size() + rank.id(), i};
    const at::Tensor seed = at::randn({4, 3}, generator_of({batch.number + 50})).to(dtype);
    way.backward(engine, engine(input_of(*net, batch, {4, 9})), seed);
    engine.pager().end_backward();  // for those that called backward() themselves
  }
  Pager& pager = engine.pager();
  ClosedWindow window = pager.close_window();
  EXPECT_TRUE(std::isfinite(window.squares().total()));
  window.meet();
  std::vector<at::Tensor> gradients;
  for (const OwnedSlice& slice : pager.owned()) {
    gradients.push_back(slice.gradients.clone());
    window.publish(slice.unit);
  }
  window.open();
  return gradients;
}

class Ways : public ::testing::TestWithParam<at::ScalarType> {};

TEST_P(Ways, OfCallingBackwardGiveTheSameGradientsBitForBit) {
  at::set_num_threads(1);
  for (const auto& [stage, policy] : kZeroStages)
    run_ranks(2, [&](Rank& rank) {
      const std::vector<at::Tensor> expected = gradients_of(rank, policy, GetParam(), kWays[0]);
      double norm = 0;
      for (const at::Tensor& gradient : expected) norm += gradient.norm().item<double>();
      EXPECT_GT(norm, 0.1);
      for (size_t i = 1; i < kWays.size(); ++i) {
        const std::vector<at::Tensor> got = gradients_of(rank, policy, GetParam(), kWays[i]);
        for (size_t j = 0; j < expected.size(); ++j)
          EXPECT_TRUE(at::equal(got[j], expected[j])) << stage << ", " << kWays[i].name << ", unit " << j;
      }
    });
}

INSTANTIATE_TEST_SUITE_P(Dtypes, Ways, ::testing::Values(at::kFloat, at::kBFloat16, at::kHalf),
                         [](const auto& info) { return short_name(info.param); });

class LossScale : public ::testing::TestWithParam<ZeroStage> {
 protected:
  const PagerPolicy& policy() const { return GetParam().policy; }
};

at::Tensor half(float a, float b) { return vec(a, b).to(at::kHalf); }

TEST_P(LossScale, KeepsGradientsThatFp16CannotHold) {
  run_ranks(2, [&](Rank& rank) {
    for (const double scale : {1.0, 65536.0}) {
      Dot net;
      Config config = scaled_config(policy(), at::kHalf, 2);
      config.optimizer->lr = 0x1p22;
      config.precision.loss_scale.loss_scale = scale;
      auto engine = initialize(rank.world(), net, {.config = config});
      // The gradient 2^-30 is zero in fp16, whose smallest number is 2^-24; times the scale it is 2^-14.
      engine.backward(engine(half(0x1p-10, 0)).to(at::kFloat) * 0x1p-20f);
      engine.step();
      EXPECT_EQ(engine.get_global_grad_norm(), scale == 1 ? 0 : 0x1p-30);
      engine.destroy();
      EXPECT_EQ(values(net->w), (Floats{scale == 1 ? 2.0f : 2 - 0x1p-8f, 3}));
    }
  });
}

TEST_P(LossScale, SkipsOnAllRanksWhatOverflowsOnOneAndFallsByTheStagesRule) {
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    Config config = scaled_config(policy(), at::kHalf, 2);
    config.precision.loss_scale.initial_scale_power = 4;
    config.precision.loss_scale.loss_scale_window = 1;
    auto engine = initialize(rank.world(), net, {.config = config});
    const auto step_with = [&](float gradient) {
      engine.backward(engine(half(rank.id() == 1 ? gradient : 0.5f, 0)));
      engine.step();
    };
    EXPECT_EQ(engine.loss_scale(), 16);
    step_with(60'000);  // 16 times that is infinite
    EXPECT_FALSE(engine.was_step_applied());
    EXPECT_EQ(engine.get_global_grad_norm(), -1);
    EXPECT_EQ(engine.skipped_steps(), 1);
    // ZeRO lets the first overflow pass.
    EXPECT_EQ(engine.loss_scale(), policy().stage == 0 ? 8 : 16);
    step_with(60'000);
    EXPECT_EQ(engine.loss_scale(), policy().stage == 0 ? 4 : 8);
    step_with(0.5);
    EXPECT_TRUE(engine.was_step_applied());
    step_with(0.5);  // a window of one step after the first
    EXPECT_EQ(engine.loss_scale(), policy().stage == 0 ? 8 : 16);
    engine.destroy();
    EXPECT_EQ(values(net->w), (Floats{1.5, 3}));
  });
}

TEST_P(LossScale, IsRequiredOfADirectBackward) {
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = scaled_config(policy(), at::kHalf, 2)});
    for (int i = 0; i < 2; ++i)
      EXPECT_SAYS(error_of<std::exception>([&] { engine(half(1, 1)).backward(); }),
                  "Loss scaling is required for this configuration");
    EXPECT_FALSE(net->w.grad().defined());
    const at::Tensor broken = engine(half(1, 1));
    broken.register_hook([](const at::Tensor&) { throw StateError("broken"); });
    EXPECT_SAYS(error_of<std::exception>([&] { engine.backward(broken); }), "broken");
    EXPECT_SAYS(error_of<std::exception>([&] { engine(half(1, 1)).backward(); }), "Loss scaling is required");
    engine.scale(engine(half(0.5, 0))).backward();
    // Scaled is what began at scale(): a pass after it is refused again.
    EXPECT_SAYS(error_of<std::exception>([&] { engine(half(1, 1)).backward(); }), "engine.scale(loss).backward()");
    engine.step();
    engine.destroy();
    EXPECT_EQ(values(net->w), (Floats{1.75, 3}));
  });
}

TEST_P(LossScale, OfOneAsksForNothing) {
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    Config config = scaled_config(policy(), at::kHalf, 1);
    config.precision.loss_scale.loss_scale = 1;
    auto engine = initialize(rank.world(), net, {.config = config});
    engine(half(0.5, 0)).backward();
    engine.step();
    engine.destroy();
    EXPECT_EQ(values(net->w), (Floats{1.75, 3}));
  });
}

TEST_P(LossScale, AtItsMinimumEndsTheRunUnderZeroWithNothingChanged) {
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    Config config = scaled_config(policy(), at::kHalf, 2);
    config.precision.loss_scale.initial_scale_power = 0;
    config.precision.loss_scale.hysteresis = 1;
    auto engine = initialize(rank.world(), net, {.config = config});
    const auto overflow = [&] {
      engine.backward(engine(half(1, 0)) * std::numeric_limits<float>::infinity());
      engine.step();
    };
    if (policy().stage == 0) {
      overflow();
      EXPECT_EQ(engine.loss_scale(), 1);
      EXPECT_EQ(engine.skipped_steps(), 1);
      return;
    }
    EXPECT_SAYS(error_of<StateError>(overflow),
                "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.");
    EXPECT_EQ(engine.global_steps(), 0);
    engine.backward(engine(half(0.5, 0)));  // the engine still works
    engine.step();
    engine.destroy();
    EXPECT_EQ(values(net->w), (Floats{1.75, 3}));
  });
}

TEST_P(LossScale, ComesBackWithACheckpoint) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Config config = scaled_config(policy(), at::kHalf, 2);
    config.precision.loss_scale.hysteresis = 3;
    {
      Dot net;
      auto engine = initialize(rank.world(), net, {.config = config});
      for (int i = 0; i < 2; ++i) {
        engine.backward(engine(half(1, 0)) * std::numeric_limits<float>::infinity());
        engine.step();
      }
      engine.save_checkpoint(folder.path());
    }
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = config});
    engine.load_checkpoint(folder.path());
    // The third overflow lowers the scale under ZeRO, whose hysteresis came back too; at ZeRO stage 0 each one does.
    EXPECT_EQ(engine.loss_scale(), policy().stage == 0 ? 64 : 256);
    engine.backward(engine(half(1, 0)) * std::numeric_limits<float>::infinity());
    engine.step();
    EXPECT_EQ(engine.loss_scale(), policy().stage == 0 ? 32 : 128);
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, LossScale, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

TEST(Fp16, CastsInputsWhereAutoCastAsksForIt) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    Config config = scaled_config({}, at::kHalf, 1);
    config.precision.casts_inputs = true;
    auto engine = initialize(rank.world(), net, {.config = config});
    const at::Tensor input = vec(1, 1);
    EXPECT_EQ(engine(input).scalar_type(), at::kHalf);
    EXPECT_EQ(input.scalar_type(), at::kFloat);
  });
}

TEST(Fp16, LeavesBuffersInTheirDtypeUnlessTheConfigurationGivesThemOne) {
  run_ranks(1, [](Rank& rank) {
    for (const at::ScalarType dtype : {at::kHalf, at::kFloat}) {
      auto model = make_conv_net();
      Config config = scaled_config({}, at::kHalf, 1);
      if (dtype == at::kHalf) config.precision.buffer_dtype = dtype;
      Engine engine(rank.world(), *model.module, {.config = config});
      EXPECT_EQ(model.module->named_buffers()["norm.running_mean"].scalar_type(), dtype);
    }
  });
}

TEST(Dtypes, AreToldInATableAtTheStart) {
  const auto table_of = [](const Config& config) {
    const CapturedLog log;
    run_ranks(2, [&](Rank& rank) {
      auto model = make_conv_net();
      Engine engine(rank.world(), *model.module, {.config = config});
    });
    return log.text();
  };
  EXPECT_EQ(table_of(sgd_config(2)), R"(info precision: full; dtypes, and bytes on rank 0
  load              fp32            1.4 kB
  preparation       fp32            1.8 kB  buffers fp32
  optimizer init    fp32           0 bytes  masters none, states none
  forward, backward fp32            1.8 kB  gradients summed in fp32, sent in fp32
  optimizer step    fp32
)");
  Config half = scaled_config({.stage = 2}, at::kHalf, 2);
  half.optimizer = OptimizerOptions{};
  half.precision.loss_scale = {};
  half.precision.communication_dtype = at::kBFloat16;
  EXPECT_EQ(table_of(half), R"(info precision: mixed; dtypes, and bytes on rank 0
  load              fp32            1.4 kB
  preparation       fp16         896 bytes  buffers fp32
  optimizer init    fp32            2.0 kB  masters fp32, states fp32
  forward, backward fp16         896 bytes  gradients summed in fp32, sent in bf16
  optimizer step    fp32                    loss scale 65536 (dynamic)
)");
  Config autocast = sgd_config(2);
  autocast.precision.autocast = {.enabled = true};
  EXPECT_EQ(table_of(autocast), R"(info precision: mixed; dtypes, and bytes on rank 0
  load              fp32            1.4 kB
  preparation       fp32            1.8 kB  buffers fp32
  optimizer init    fp32           0 bytes  masters none, states none
  forward, backward bf16            1.8 kB  gradients summed in fp32, sent in bf16+fp32
  optimizer step    fp32
)");
}

TEST(Progress, ShowsTheLossScale) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    Config config = scaled_config({}, at::kHalf, 1);
    config.steps_per_print = 1;
    auto engine = initialize(rank.world(), net, {.config = config});
    const CapturedLog log;
    engine.backward(engine(half(0.5, 0)));
    engine.step();
    EXPECT_EQ(log.text(), "info step=1, skipped=0, lr=0.5, grad_norm=0.5, loss_scale=256\n");
  });
}

}  // namespace
}  // namespace trireme
