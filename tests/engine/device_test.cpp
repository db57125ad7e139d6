// Work of an engine beside training when its states are on a device.
#include <ATen/Parallel.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/support/captured_log.h"
#include "tests/support/error_of.h"
#include "tests/support/fake_device/fake_device.h"
#include "tests/support/fake_device/fake_nccl.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/engine/engine.h"
#include "trireme/formats/safetensors.h"
#include "trireme/pager/init/gathered.h"

namespace trireme::on_devices {
namespace {

using namespace testing;

enum class Place { kHost, kDevice };

Config make_config(int ranks, int stage, at::ScalarType dtype = at::kFloat) {
  Config config = default_config(ranks);
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kAdamW, .lr = 1e-2};
  config.scheduler = LrScheduleOptions{.kind = LrScheduleKind::kWarmup, .warmup_num_steps = 8};
  config.precision.weight_dtype = dtype;
  config.precision.loss_scale = {.initial_scale_power = 4, .loss_scale_window = 2};
  config.gradient_clipping = 1;
  config.pager.stage = stage;
  config.pager.units.merge_below_bytes = 0;
  return config;
}

using Body = std::function<void(Rank&, Engine&, const TrainedModel&)>;

void with_engine(Place place, int ranks, const Config& config, const Body& body) {
  run_ranks(ranks, [&](Rank& rank) {
    at::set_num_threads(1);
    TrainedModel model = make_mlp();
    std::unique_ptr<Group> group;
    if (place == Place::kDevice) {
      move_to_fake(*model.module, fake_device(rank.id()));
      if (ranks > 1) group = make_fake_nccl_group(rank.world(), fake_device(rank.id()));
    }
    Engine engine(group ? *group : rank.world(), *model.module, {.config = config});
    body(rank, engine, model);
  });
}

std::vector<double> train(Rank& rank, Engine& engine, const TrainedModel& model, int steps) {
  std::vector<double> losses;
  for (int i = 0; i < steps; ++i) {
    const int64_t step = engine.global_steps();
    at::Tensor loss = model.loss({step * rank.size() + rank.id(), step});
    if (step == 1) loss = loss * std::numeric_limits<double>::infinity();  // is skipped
    engine.backward(loss);
    engine.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

class DeviceCheckpoint : public ::testing::TestWithParam<std::tuple<int, at::ScalarType, double>> {};

TEST_P(DeviceCheckpoint, ContinuesOnTheHostAndTheOtherWayRound) {
  const auto& [stage, dtype, offload_ratio] = GetParam();
  Config config = make_config(2, stage, dtype);
  config.pager.offload_ratio = offload_ratio;
  config.pager.offload_parameters = stage == 3 && offload_ratio > 0;
  const TemporaryFolder folder;
  FakeRecord record;
  std::vector<double> straight, after;
  double lr = 0, scale = 0;
  with_engine(Place::kDevice, 2, config, [&](Rank& rank, Engine& engine, const TrainedModel& model) {
    train(rank, engine, model, 4);
    engine.save_checkpoint(folder.path());
    const auto losses = train(rank, engine, model, 3);
    if (rank.id() == 0) {
      straight = losses;
      lr = engine.get_lr();
      scale = engine.loss_scale();
    }
  });
  for (const Place place : {Place::kDevice, Place::kHost})
    with_engine(place, 2, config, [&](Rank& rank, Engine& engine, const TrainedModel& model) {
      ASSERT_TRUE(engine.load_checkpoint(folder.path()).has_value());
      EXPECT_EQ(engine.global_steps(), 4);
      EXPECT_EQ(engine.skipped_steps(), 1);
      const auto losses = train(rank, engine, model, 3);
      if (rank.id() != 0) return;
      for (size_t i = 0; i < losses.size(); ++i) {
        // On the same place the same bits.
        EXPECT_NEAR(losses[i], straight[i], place == Place::kDevice ? 0 : dtype == at::kFloat ? 1e-5 : 2e-2) << i;
      }
      EXPECT_NEAR(engine.get_lr(), lr, 1e-9);
      EXPECT_EQ(engine.loss_scale(), scale);
      if (place == Place::kHost) engine.destroy();
    });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(Stages, DeviceCheckpoint,
                         ::testing::Combine(::testing::Values(0, 2, 3), ::testing::Values(at::kFloat, at::kHalf),
                                            ::testing::Values(0.0, 0.5, 1.0)),
                         [](const auto& info) {
                           const double ratio = std::get<2>(info.param);
                           return "Stage" + std::to_string(std::get<0>(info.param)) +
                                  c10::toString(std::get<1>(info.param)) +
                                  (ratio == 0   ? ""
                                   : ratio == 1 ? "Offload"
                                                : "OffloadHalf");
                         });

// Weights that are still on their way to the device may not be overwritten by a load.
TEST(EngineOnDevices, WhatIsOffloadedIsLoadedWhenItHasLeft) {
  const TemporaryFolder folder;
  FakeRecord record;
  Config config = make_config(1, 2, at::kBFloat16);
  config.gradient_clipping = 0;  // no norm for which the host waits
  config.precision.check_grad_overflow = false;
  config.pager.offload_ratio = 1;
  with_engine(Place::kDevice, 1, config, [&](Rank&, Engine& engine, const TrainedModel& model) {
    const auto step = [&] {
      engine.backward(model.loss({engine.global_steps(), 0}));
      engine.step();
    };
    step();
    engine.save_checkpoint(folder.path());
    step();
    ASSERT_TRUE(engine.load_checkpoint(folder.path()).has_value());
    step();
    const double norm = engine.get_global_grad_norm().value();
    ASSERT_TRUE(engine.load_checkpoint(folder.path()).has_value());
    step();
    EXPECT_EQ(engine.get_global_grad_norm().value(), norm);
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

class OffloadRatio : public ::testing::TestWithParam<double> {};
INSTANTIATE_TEST_SUITE_P(EngineOnDevices, OffloadRatio, ::testing::Values(0, 1),
                         [](const auto& info) { return info.param == 0 ? "None" : "All"; });

TEST_P(OffloadRatio, StatesOfSingleParametersAreReadAndWritten) {
  FakeRecord record;
  Config config = make_config(2, 3, at::kBFloat16);
  config.pager.offload_ratio = GetParam();
  with_engine(Place::kDevice, 2, config, [](Rank& rank, Engine& engine, const TrainedModel& model) {
    train(rank, engine, model, 2);
    at::Tensor weight = model.module->parameters().front();
    const at::Tensor value = *safe_get_full_fp32_param(weight);
    EXPECT_TRUE(value.device().is_cpu());
    EXPECT_GT(value.abs().sum().item<double>(), 0);
    safe_set_full_fp32_param(weight, at::full_like(value, 0.5));
    EXPECT_TRUE(safe_get_full_fp32_param(weight)->eq(0.5).all().item<bool>());
    EXPECT_EQ(weight.sum().item<double>(), 0.5 * static_cast<double>(weight.numel()));
    const at::Tensor state = *safe_get_full_optimizer_state(weight, "exp_avg");
    EXPECT_GT(state.abs().sum().item<double>(), 0);
    // A gradient that the user writes is what counts, for the norm too.
    engine.backward(model.loss({rank.id(), 0}));
    safe_set_full_grad(weight, at::zeros_like(value));
    EXPECT_EQ(safe_get_full_grad(weight)->abs().sum().item<double>(), 0);
    for (const at::Tensor& other : model.module->parameters())
      if (!other.is_same(weight)) safe_set_full_grad(other, at::full_like(other.detach().cpu(), 0.0, at::kFloat));
    engine.step();
    EXPECT_EQ(engine.get_global_grad_norm().value(), 0);
  });
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(EngineOnDevices, WeightsAreExported) {
  const TemporaryFolder folder;
  FakeRecord record;
  with_engine(Place::kDevice, 2, make_config(2, 3), [&](Rank& rank, Engine& engine, const TrainedModel& model) {
    train(rank, engine, model, 1);
    engine.save_16bit_model(folder.path());
    engine.destroy();
    if (rank.id() != 0) return;
    const auto saved = read_safetensors(folder.path() / "model.safetensors");
    for (const auto& item : model.module->named_parameters())
      EXPECT_TRUE(saved.at(item.key()).equal(item.value().detach().cpu())) << item.key();
  });
}

TEST(EngineOnDevices, AStepThatChangesNothingIsToldLater) {
  FakeRecord record;
  CapturedLog log;
  with_engine(Place::kDevice, 1, make_config(1, 1), [&](Rank&, Engine& engine, const TrainedModel& model) {
    engine.backward(model.loss({0, 0}) * std::numeric_limits<double>::infinity());
    engine.step();
    EXPECT_FALSE(engine.was_step_applied());
    EXPECT_EQ(engine.skipped_steps(), 1);
    engine.backward(model.loss({0, 0}));
    engine.step();
    EXPECT_TRUE(engine.was_step_applied());
  });
  EXPECT_SAYS(log.text(), "step 1 changed nothing: a gradient is not finite (1 such so far)");
}

TEST(EngineOnDevices, ARateThatIsSetHoldsForOneStepAndThenTheSchedulesAgain) {
  FakeRecord record;
  std::vector<double> rates[2];
  for (const Place place : {Place::kHost, Place::kDevice})
    with_engine(place, 1, make_config(1, 1), [&](Rank& rank, Engine& engine, const TrainedModel& model) {
      for (int i = 0; i < 4; ++i) {
        if (i == 2) engine.set_lr(0.25);
        rates[place == Place::kDevice].push_back(engine.get_lr());
        rates[place == Place::kDevice].push_back(train(rank, engine, model, 1)[0]);
      }
    });
  ASSERT_EQ(rates[0].size(), rates[1].size());
  for (size_t i = 0; i < rates[0].size(); ++i) {
    if (std::isfinite(rates[0][i])) {
      EXPECT_NEAR(rates[0][i], rates[1][i], 1e-5) << i;
    }
  }
}

TEST(EngineOnDevices, ARateThatIsAskedForSeldomIsThatOfTheLastAppliedStep) {
  FakeRecord record;
  std::vector<double> rates[2];
  for (const Place place : {Place::kHost, Place::kDevice})
    with_engine(place, 1, make_config(1, 1), [&](Rank&, Engine& engine, const TrainedModel& model) {
      for (int step = 0; step < 5; ++step) {
        const double factor = step == 4 ? std::numeric_limits<double>::infinity() : 1;
        engine.backward(model.loss({step, step}) * factor);
        engine.step();
        if (step == 1 || step == 4) rates[place == Place::kDevice].push_back(engine.get_lr());
      }
    });
  EXPECT_NE(rates[0][0], rates[0][1]);
  EXPECT_EQ(rates[0], rates[1]);
}

TEST(EngineOnDevices, InsideAWindowNoStepWasApplied) {
  FakeRecord record;
  Config config = make_config(1, 1);
  config.batch.train_batch_size = config.batch.gradient_accumulation_steps = 2;
  with_engine(Place::kDevice, 1, config, [&](Rank&, Engine& engine, const TrainedModel& model) {
    for (int micro = 0; micro < 3; ++micro) {
      engine.backward(model.loss({micro, micro}));
      engine.step();
    }
    EXPECT_FALSE(engine.was_step_applied());
    EXPECT_GT(engine.get_global_grad_norm().value(), 0);
  });
}

TEST(EngineOnDevices, TheSmallestLossScaleEndsARunInWhichSomebodyAsks) {
  FakeRecord record;
  Config config = make_config(1, 1, at::kHalf);
  config.precision.loss_scale = {.initial_scale_power = 1, .hysteresis = 1, .min_loss_scale = 1};
  with_engine(Place::kDevice, 1, config, [&](Rank&, Engine& engine, const TrainedModel& model) {
    const std::string text = error_of<Error>([&] {
      for (int step = 0; step < 6; ++step) {
        engine.backward(model.loss({step, step}) * std::numeric_limits<double>::infinity());
        engine.step();
        (void)engine.get_global_grad_norm();
      }
    });
    EXPECT_SAYS(text, "minimum");
  });
}

TEST(EngineOnDevices, AScheduleGoesOnWithoutTheOptimizersStates) {
  const TemporaryFolder folder;
  FakeRecord record;
  std::vector<double> rates[2];
  for (const Place place : {Place::kHost, Place::kDevice})
    with_engine(place, 1, make_config(1, 1), [&](Rank& rank, Engine& engine, const TrainedModel& model) {
      train(rank, engine, model, 4);
      const std::string tag = place == Place::kHost ? "host" : "device";
      engine.save_checkpoint(folder.path(), {.tag = tag});
      (void)engine.load_checkpoint(folder.path(), {.tag = tag, .load_optimizer_states = false});
      train(rank, engine, model, 2);
      rates[place == Place::kDevice] = {engine.get_lr(), static_cast<double>(engine.skipped_steps())};
    });
  EXPECT_EQ(rates[0], rates[1]);
}

TEST(EngineOnDevices, OneRankGathersParametersForWriting) {
  FakeRecord record;
  for (const bool offloads : {false, true}) {
    Config config = make_config(1, 3);
    config.pager.offload_ratio = offloads;
    config.pager.offload_parameters = offloads;
    with_engine(Place::kDevice, 1, config, [&](Rank&, Engine&, const TrainedModel& model) {
      const at::Tensor weight = model.module->parameters().front();
      zero::GatheredParameters whole({weight}, {.modifier_rank = 0});
      {
        const at::NoGradGuard no_grad;
        at::Tensor(weight).fill_(3);
      }
      whole.close();
      EXPECT_EQ(weight.sum().item<double>(), 3.0 * static_cast<double>(weight.numel()));
      EXPECT_EQ(safe_get_full_fp32_param(weight)->sum().item<double>(), 3.0 * static_cast<double>(weight.numel()));
    });
  }
  EXPECT_EQ(record.races(), std::vector<std::string>());
}

TEST(EngineOnDevices, OffloadingStatesIsRefusedByName) {
  FakeRecord record;
  with_engine(Place::kDevice, 1, make_config(1, 1), [](Rank&, Engine& engine, const TrainedModel&) {
    const std::string text = error_of<ConfigError>([&] { engine.offload_states(); });
    EXPECT_SAYS(text, "offload_states: states on fake:0 cannot be offloaded yet");
  });
}

TEST(EngineOnDevices, LambIsRefusedByName) {
  FakeRecord record;
  Config config = make_config(1, 1);
  config.optimizer->kind = OptimizerKind::kLamb;
  config.pager.offload_ratio = 0.5;  // of two units the first stays
  const std::string text =
      error_of<Error>([&] { with_engine(Place::kDevice, 1, config, [](Rank&, Engine&, const TrainedModel&) {}); });
  EXPECT_SAYS(text, "optimizer.type: Lamb is for parameters on the host, and these are on fake:0");
}

TEST(EngineOnDevices, OffloadingIsToldWhereItHasNoEffect) {
  FakeRecord record;
  Config config = make_config(1, 0);
  config.pager.offload_ratio = 1;
  for (const auto& [place, why] : {std::pair{Place::kDevice, "stage 0 shards nothing; use stage 1, 2 or 3"},
                                   std::pair{Place::kHost, "the model is on the host"}}) {
    CapturedLog log;
    with_engine(place, 1, config, [](Rank&, Engine&, const TrainedModel&) {});
    EXPECT_SAYS(log.text(), std::string("offload_optimizer and offload_param: without effect, ") + why);
  }
}

TEST(EngineOnDevices, RanksWithoutABackendForTheirDeviceAreToldWhatIsThere) {
  FakeRecord record;
  const std::string text = error_of<Error>([&] {
    run_ranks(2, [&](Rank& rank) {
      TrainedModel model = make_mlp();
      move_to_fake(*model.module, fake_device(rank.id()));
      Engine engine(rank.world(), *model.module, {.config = make_config(2, 1)});
    });
  });
  EXPECT_SAYS(text, "there are backends for NVIDIA GPUs alone");
}

// The work of Python's binding for a step(): it gives the program's changes, steps, and takes over what the host
// knows.
TEST(EngineOnDevices, AStepAsPythonMakesItWaitsForNothing) {
  for (const bool sets_rate : {false, true}) {
    FakeRecord record;
    with_engine(Place::kDevice, 1, make_config(1, 1, at::kHalf), [&](Rank&, Engine& engine, const TrainedModel& model) {
      for (int i = 0; i < 5; ++i) {
        const at::Tensor loss = model.loss({i, 0});
        const int64_t before = record.host_waits();
        engine.backward(loss);
        OptimizerOptions options = engine.known_hyperparameters(0);
        if (sets_rate) options.lr = 0.125;
        if (sets_rate) engine.set_hyperparameters(options, 0);
        EXPECT_TRUE(engine.step().ended_window);
        (void)engine.known_hyperparameters(0);
        EXPECT_EQ(record.host_waits(), before) << "step " << i;
      }
      const int64_t before = record.host_waits();
      EXPECT_EQ(engine.known_hyperparameters(0).lr, engine.get_lr());  // of the stand-in the host hears at once
      EXPECT_GT(record.host_waits(), before);
    });
    EXPECT_EQ(record.races(), std::vector<std::string>());
  }
}

}  // namespace
}  // namespace trireme::on_devices
