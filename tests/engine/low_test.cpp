// Mode `low` of an engine: checkpoints, a client's optimizer, access, what is refused, what is logged.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/optim/rmsprop.h>

#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/captured_log.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/manifest.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

enum class Mode { kMixed, kLow, kStochastic };

Config config_of(int world, int stage, Mode mode) {
  Config config = sgd_config(world);
  config.optimizer = OptimizerOptions{.lr = 0.01, .weight_decay = 0.1};
  config.precision.weight_dtype = at::kBFloat16;
  if (mode != Mode::kMixed) config.precision.accumulation_dtype = config.precision.update_dtype = at::kBFloat16;
  config.precision.stochastic_rounding = mode == Mode::kStochastic;
  config.pager.stage = stage;
  config.pager.units.merge_below_bytes = 0;
  return config;
}

void train(Engine& engine, TrainedModel& model, Rank& rank, int64_t steps) {
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t round = engine.micro_steps();
    engine.backward(model.loss({round * rank.size() + rank.id(), round}));
    engine.step();
  }
}

void expect_same_weights(const TrainedModel& one, const TrainedModel& other) {
  const auto expected = other.module->named_parameters();
  for (const auto& item : one.module->named_parameters()) {
    EXPECT_EQ(item.value().scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
  }
}

void expect_continued(Mode mode) {
  for (int stage = 0; stage <= 3; ++stage) {
    const TemporaryFolder folder;
    run_ranks(2, [&](Rank& rank) {
      at::set_num_threads(1);
      auto straight = make_mlp();
      Engine engine(rank.world(), *straight.module, {.config = config_of(2, stage, mode)});
      train(engine, straight, rank, 4);
      engine.save_checkpoint(folder.path());
      train(engine, straight, rank, 3);
      auto resumed = make_mlp();
      Engine other(rank.world(), *resumed.module, {.config = config_of(2, 3 - stage, mode)});
      ASSERT_TRUE(other.load_checkpoint(folder.path()).has_value());
      train(other, resumed, rank, 3);
      engine.destroy();
      other.destroy();
      expect_same_weights(resumed, straight);
    });
    for (const SavedTensor& tensor : read_manifest(folder.path() / "global_step4").tensors) {
      EXPECT_EQ(tensor.dtype, at::kBFloat16) << tensor.name;
      EXPECT_FALSE(tensor.name.starts_with("master.")) << tensor.name;
    }
  }
}

TEST(LowCheckpoint, ContinuesBitByBitAndHasNoMastersAndStatesInBf16) { expect_continued(Mode::kLow); }
TEST(LowCheckpoint, ContinuesWithTheSameRandomNumbers) { expect_continued(Mode::kStochastic); }

/// exp_avg of the first parameter, and the weights, after a load of what `from` has saved.
void expect_converted(Mode from, Mode to) {
  const TemporaryFolder folder;
  const CapturedLog log;
  run_ranks(2, [&](Rank& rank) {
    at::set_num_threads(1);
    auto saved = make_mlp();
    Engine engine(rank.world(), *saved.module, {.config = config_of(2, 2, from)});
    train(engine, saved, rank, 4);
    engine.save_checkpoint(folder.path());
    auto loaded = make_mlp();
    Engine other(rank.world(), *loaded.module, {.config = config_of(2, 3, to)});
    ASSERT_TRUE(other.load_checkpoint(folder.path()).has_value());
    const auto state_of = [](const TrainedModel& model, const char* state) {
      return *safe_get_full_optimizer_state(model.module->parameters()[0], state);
    };
    for (const char* state : {"exp_avg", "exp_avg_sq"}) {
      EXPECT_GT(state_of(saved, state).abs().max().item<float>(), 0);
      EXPECT_TRUE(at::equal(state_of(loaded, state), state_of(saved, state).to(at::kBFloat16).to(at::kFloat)));
    }
    const at::Tensor weight = saved.module->parameters()[0].to(at::kFloat);
    EXPECT_TRUE(at::equal(*safe_get_full_fp32_param(loaded.module->parameters()[0]), weight));
    train(other, loaded, rank, 1);
    EXPECT_EQ(other.global_steps(), 5);
    engine.destroy();
    other.destroy();
  });
  EXPECT_SAYS(log.text(), from == Mode::kLow ? "are in BFloat16 and become Float" : "are in Float and become BFloat16");
}

TEST(LowCheckpoint, OfMixedPrecisionIsRounded) { expect_converted(Mode::kMixed, Mode::kLow); }
TEST(LowCheckpoint, LoadsIntoMixedPrecision) { expect_converted(Mode::kLow, Mode::kMixed); }

TEST(LowEngine, LetsAClientStepPartsInBf16) {
  run_ranks(2, [](Rank& rank) {
    at::set_num_threads(1);
    const ClientOptimizerFactory rmsprop = [](const std::vector<at::Tensor>& parts, const auto&) {
      return std::make_unique<torch::optim::RMSprop>(parts, torch::optim::RMSpropOptions(0.01).momentum(0.5));
    };
    auto plain = make_mlp();
    plain.module->to(at::kBFloat16);
    torch::optim::RMSprop optimizer(plain.module->parameters(), torch::optim::RMSpropOptions(0.01).momentum(0.5));
    auto sharded = make_mlp();
    Config config = config_of(2, 3, Mode::kLow);
    config.optimizer.reset();
    Engine engine(rank.world(), *sharded.module, {.config = config, .client_optimizer = rmsprop});
    for (int64_t step = 0; step < 5; ++step) {
      optimizer.zero_grad();
      plain.loss({step, step}).backward();
      optimizer.step();
      engine.backward(sharded.loss({step, step}));  // the same on both ranks, so that the mean is that gradient
      engine.step();
    }
    engine.destroy();
    expect_same_weights(sharded, plain);
  });
}

TEST(LowEngine, RefusesAnOptimizerOfFp32MastersBeforeItChangesTheModel) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    Config config = config_of(1, 0, Mode::kLow);
    config.optimizer->kind = OptimizerKind::kLion;
    EXPECT_SAYS(error_of<ConfigError>([&] { (void)initialize(rank.world(), net, {.config = config}); }),
                "optimizer.type: Lion updates fp32 masters, which bf16.bf16_master_weights_and_grads does without");
    EXPECT_EQ(net->w.scalar_type(), at::kFloat);
  });
}

TEST(LowEngine, RefusesWhatWouldNotRoundAlikeOnAllRanks) {
  run_ranks(1, [](Rank& rank) {
    Dot net;
    const auto refusal = [&](const InitializeOptions& options) {
      return error_of<ConfigError>([&] { (void)initialize(rank.world(), net, options); });
    };
    Config config = config_of(1, 0, Mode::kStochastic);
    config.optimizer.reset();
    const ClientOptimizerFactory client = [](const std::vector<at::Tensor>& parts, const auto&) {
      return std::make_unique<torch::optim::RMSprop>(parts, torch::optim::RMSpropOptions(0.01));
    };
    EXPECT_SAYS(refusal({.config = config, .client_optimizer = client}),
                "trireme.stochastic_rounding: a client_optimizer rounds by itself; remove the key");
    EXPECT_EQ(net->w.scalar_type(), at::kFloat);
  });
  run_ranks(2, [](Rank& rank) {
    Dot net;
    Config config = config_of(2, 0, Mode::kStochastic);
    config.batch = {1, 1, 1};
    config.degrees = {.data = 1, .tensor = 2};
    config.tensor.autotp_size = 2;
    EXPECT_SAYS(error_of<ConfigError>([&] { (void)initialize(rank.world(), net, {.config = config}); }),
                "trireme.stochastic_rounding: with tensor_parallel (autotp_size=2) it is not there yet");
  });
}

std::string table_of(const Config& config, at::ScalarType loaded) {
  const CapturedLog log;
  run_ranks(2, [&](Rank& rank) {
    auto model = make_mlp();
    model.module->to(loaded);
    Engine engine(rank.world(), *model.module, {.config = config});
  });
  return log.text();
}

TEST(PrecisionTable, SaysWhatIsCastUpAndWhatThatCosts) {
  EXPECT_EQ(table_of(config_of(2, 3, Mode::kLow), at::kBFloat16),
            R"(info precision: low; dtypes, and bytes on rank 0
  load              bf16         976 bytes
  preparation       bf16         640 bytes  buffers none
  optimizer init    bf16            1.2 kB  masters none, states bf16
  forward, backward bf16         640 bytes  gradients summed in bf16, sent in bf16
  optimizer step    bf16
)");
  EXPECT_EQ(table_of(config_of(2, 3, Mode::kMixed), at::kBFloat16),
            R"(info precision: mixed; dtypes, and bytes on rank 0
  load              bf16         976 bytes
  preparation       bf16         640 bytes  buffers none
  optimizer init    fp32            3.6 kB  masters fp32, states fp32
  forward, backward bf16            1.3 kB  gradients summed in fp32, sent in bf16
  optimizer step    fp32
warning precision: parameters that came in bf16 are cast up to fp32 masters, 1.2 kB on rank 0, and their optimizer )"
            "states take 1.2 kB more than in 16 bits; for updates in bf16 set bf16.bf16_master_weights_and_grads and "
            "bf16.bf16_optimizer_states to true\n");
  EXPECT_EQ(table_of(config_of(2, 1, Mode::kMixed), at::kFloat),
            R"(info precision: mixed; dtypes, and bytes on rank 0
  load              fp32            2.0 kB
  preparation       bf16            1.3 kB  buffers none
  optimizer init    fp32            3.6 kB  masters fp32, states fp32
  forward, backward bf16            2.6 kB  gradients summed in fp32, sent in fp32
  optimizer step    fp32
)");
}

}  // namespace
}  // namespace trireme
