// State that a checkpoint of an engine brings back, and state that it leaves alone.
#include <ATen/Parallel.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "tests/engine/dot.h"
#include "tests/engine/stages.h"
#include "tests/support/captured_log.h"
#include "tests/support/draw_from_slice.h"
#include "tests/support/models.h"
#include "tests/support/run_ranks.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/manifest.h"
#include "trireme/engine/model_engine.h"

namespace trireme {
namespace {

using namespace testing;

class Resume : public ::testing::TestWithParam<Stage> {
 protected:
  static Config config(int world) {
    Config config = with_stage(sgd_config(world, 2), GetParam());
    config.optimizer = OptimizerOptions{.lr = 0.01, .weight_decay = 0.1};
    config.scheduler = LrScheduleOptions{.kind = LrScheduleKind::kWarmup, .warmup_num_steps = 20};
    config.gradient_clipping = 0.3;
    return config;
  }

  static void train(Engine& engine, testing::TrainedModel& model, Rank& rank, int64_t micro_steps) {
    for (int64_t i = 0; i < micro_steps; ++i) {
      const int64_t round = engine.micro_steps();
      // The rank's own generator takes part, as in dropout.
      const at::Tensor noise = 1 + 0.1 * at::rand({});
      engine.backward(model.loss({round * rank.size() + rank.id(), round}) * noise);
      engine.step();
    }
  }
};

TEST_P(Resume, ContinuesBitByBitAtTheSameWorldSize) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    at::set_num_threads(1);
    auto straight = testing::make_conv_net();
    Engine engine(rank.world(), *straight.module, {.config = config(2)});
    train(engine, straight, rank, 8);
    engine.save_checkpoint(folder.path(), {.client_state = R"({"epoch": 3})"});
    train(engine, straight, rank, 6);

    auto resumed = testing::make_conv_net();
    Engine other(rank.world(), *resumed.module, {.config = config(2)});
    train(other, resumed, rank, 2);  // what stands there is overwritten
    const auto loaded = other.load_checkpoint(folder.path());
    ASSERT_TRUE(loaded.has_value());
    EXPECT_EQ(loaded->tag, "global_step4");
    EXPECT_EQ(loaded->client_state, R"({"epoch":3})");
    EXPECT_EQ(other.global_steps(), 4);
    EXPECT_EQ(other.micro_steps(), 8);
    EXPECT_EQ(other.global_samples(), 16);
    train(other, resumed, rank, 6);
    EXPECT_EQ(other.get_lr(), engine.get_lr());
    EXPECT_EQ(*other.get_global_grad_norm(), *engine.get_global_grad_norm());
    engine.destroy();
    other.destroy();
    const auto expected = straight.module->named_parameters();
    for (const auto& item : resumed.module->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
    const auto buffers = straight.module->named_buffers();
    for (const auto& item : resumed.module->named_buffers())
      EXPECT_TRUE(at::equal(item.value(), buffers[item.key()])) << item.key();
  });
}

TEST_P(Resume, LoadsWeightsAloneAndRefreshesTheMasters) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    auto saved = testing::make_mlp();
    Engine engine(rank.world(), *saved.module, {.config = config(2)});
    train(engine, saved, rank, 4);
    engine.save_checkpoint(folder.path(), {.tag = "best"});
    auto fresh = testing::make_mlp();
    Engine other(rank.world(), *fresh.module, {.config = config(2)});
    ASSERT_TRUE(other.load_checkpoint(folder.path(), {.load_module_only = true}).has_value());
    EXPECT_EQ(other.global_steps(), 0);
    EXPECT_EQ(other.get_lr(), 0);
    train(other, fresh, rank, 2);  // the warm-up begins with a learning rate of 0: nothing may move
    engine.destroy();
    other.destroy();
    const auto expected = saved.module->named_parameters();
    for (const auto& item : fresh.module->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
  });
}

TEST_P(Resume, TakesTheWeightsThatACustomLoadMakesAndTheStatesAsSaved) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    auto saved = testing::make_mlp();
    Engine engine(rank.world(), *saved.module, {.config = config(2)});
    train(engine, saved, rank, 8);
    engine.save_checkpoint(folder.path());
    auto fresh = testing::make_mlp();
    auto other = initialize(rank.world(), fresh.module, {.config = config(2)});
    const auto halve = [&](const std::map<std::string, at::Tensor>& weights, torch::nn::Module& module) {
      const at::NoGradGuard no_grad;
      for (auto& item : module.named_parameters()) {
        EXPECT_FALSE(at::allclose(item.value().to(at::kFloat), weights.at(item.key()))) << "loaded already";
        item.value().copy_(weights.at(item.key()) * (rank.id() == 0 ? 0.5 : 7));  // rank 0's count
      }
    };
    ASSERT_TRUE(other.load_checkpoint(folder.path(), {}, halve).has_value());
    EXPECT_EQ(other.global_steps(), 4);
    for (const auto& item : fresh.module->named_parameters()) {
      const at::Tensor moment = *safe_get_full_optimizer_state(item.value(), "exp_avg");
      EXPECT_GT(moment.abs().max().item<float>(), 0) << item.key();
    }
    engine.destroy();
    other.destroy();
    const auto expected = saved.module->named_parameters();
    for (const auto& item : fresh.module->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), 0.5 * expected[item.key()])) << item.key();
  });
}

TEST(EngineLoad, ContinuesBothRandomStreams) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    RandomStreams::current().set_slice(rank.id());
    const testing::DrawFromSlice slices;
    auto model = testing::make_mlp();
    Engine engine(rank.world(), *model.module, {.config = sgd_config(2, 2)});
    const auto draw = [] { return at::cat({at::rand({10}), at::dropout(at::ones({100}), 0.5, true)}); };
    for (const char* tag : {"unused", "used"}) {  // of the slice's stream, when it is saved
      engine.save_checkpoint(folder.path(), {.tag = tag});
      const at::Tensor expected = draw();
      manual_seed(9);
      draw();
      engine.load_checkpoint(folder.path(), {.tag = tag});
      EXPECT_TRUE(at::equal(draw(), expected)) << tag;
    }
    engine.destroy();
  });
}

INSTANTIATE_TEST_SUITE_P(Stages, Resume, ::testing::ValuesIn(all_stages()), name_of_stage);

TEST(EngineLoad, OfAnEmptyFolderStartsAnewAndOneRankSaysSo) {
  const TemporaryFolder folder;
  const CapturedLog log;
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    auto engine = initialize(rank.world(), net, {.config = sgd_config(2)});
    EXPECT_FALSE(engine.load_checkpoint(folder.path()).has_value());
    EXPECT_EQ(values(net->w), (Floats{2, 3}));
  });
  EXPECT_SAYS(log.text(), "warning load_checkpoint: nothing to load in");
  EXPECT_EQ(log.text().find("nothing to load"), log.text().rfind("nothing to load"));
}

TEST(EngineSave, NamesTheTagsThatRanksDisagreeOn) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    Config config = sgd_config(2);
    config.checkpoint.tag_validation = TagValidation::kFail;
    auto engine = initialize(rank.world(), net, {.config = config});
    const std::string text =
        error_of<CheckpointError>([&] { engine.save_checkpoint(folder.path(), {.tag = rank.id() == 0 ? "a" : "b"}); });
    EXPECT_SAYS(text, "rank 0 says 'a'");
  });
}

TEST(EngineLoad, OfLessThanTheModelHasLeavesTheRestAsItIs) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Config config = sgd_config(1);
    config.precision.weight_dtype = at::kBFloat16;
    auto saved = make_mlp();
    at::Tensor first = saved.module->parameters()[0];
    first.set_requires_grad(false);  // no master is saved for it
    {
      const torch::NoGradGuard no_grad;
      first.fill_(0.25);
    }
    Engine engine(rank.world(), *saved.module, {.config = config});
    engine.save_checkpoint(folder.path());

    auto loaded = make_mlp();
    Engine other(rank.world(), *loaded.module, {.config = config});
    EXPECT_SAYS(error_of<CheckpointError>([&] { other.load_checkpoint(folder.path()); }), "master.layers.0.weight");
    ASSERT_TRUE(other.load_checkpoint(folder.path(), {.load_module_strict = false}).has_value());
    other.set_lr(0);
    other.backward(loaded.loss({}));
    other.step();  // rounds the masters into the weights
    EXPECT_TRUE(loaded.module->parameters()[0].eq(0.25).all().item<bool>());
  });
}

TEST(EngineLoad, WithoutTheStepsOfAParameterNamesItBeforeAnythingChanges) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    Dot net;
    Config config = sgd_config(2);
    config.pager.stage = 3;
    auto engine = initialize(rank.world(), net, {.config = config});
    engine.backward(engine(vec(2, 0)));
    engine.step();
    engine.save_checkpoint(folder.path(), {.tag = "one"});
    if (rank.id() == 0) {
      Manifest manifest = read_manifest(folder.path() / "one");
      EXPECT_EQ(manifest.tensors.at(0).values, R"({"steps":1,"group":0,"position":0})");
      manifest.tensors[0].values = R"({"group":0,"position":0})";
      std::ofstream(folder.path() / "one/manifest.json") << dump_manifest(manifest);
    }
    rank.world().barrier();
    engine.backward(engine(vec(2, 0)));
    engine.step();
    EXPECT_SAYS(error_of<CheckpointError>([&] { engine.load_checkpoint(folder.path()); }),
                "expected the number of steps of \"w\", found none");
    EXPECT_EQ(engine.global_steps(), 2);
    ASSERT_TRUE(engine.load_checkpoint(folder.path(), {.load_optimizer_states = false}).has_value());
    EXPECT_EQ(engine.global_steps(), 1);
  });
}

TEST(EngineLoad, OfNothingKeepsWhatTheUserWrote) {
  const TemporaryFolder folder;
  run_ranks(1, [&](Rank& rank) {
    Dot net;
    Config config = sgd_config(1);
    config.precision.weight_dtype = at::kBFloat16;
    auto engine = initialize(rank.world(), net, {.config = config});
    {
      const torch::NoGradGuard no_grad;
      net->w.fill_(8);
    }
    EXPECT_FALSE(engine.load_checkpoint(folder.path()).has_value());
    engine.backward(engine(vec(2, 0)));
    engine.step();
    EXPECT_EQ(values(net->w), (Floats{7, 8}));
  });
}

TEST(Frozen, ParametersStayOutOfACheckpointOnRequestAndAreLeftAloneByItsLoad) {
  for (const Stage& stage : all_stages()) {
    SCOPED_TRACE(stage.name);
    const TemporaryFolder folder;
    const CapturedLog log;
    run_ranks(2, [&](Rank& rank) {
      const auto make = [](float value) {
        auto model = make_mlp();
        at::Tensor first = model.module->parameters()[0];
        first.set_requires_grad(false);
        const torch::NoGradGuard no_grad;
        for (at::Tensor& parameter : model.module->parameters()) parameter.fill_(value);
        return model;
      };
      const Config config = with_stage(sgd_config(2), stage);
      auto saved = make(0.25);
      Engine engine(rank.world(), *saved.module, {.config = config});
      const auto whole = engine.save_checkpoint(folder.path(), {.tag = "whole"});
      const auto some = engine.save_checkpoint(folder.path(), {.tag = "some", .exclude_frozen_parameters = true});
      const auto frozen_bytes = static_cast<int64_t>(saved.module->parameters()[0].nbytes());
      EXPECT_EQ(some.tensor_bytes, whole.tensor_bytes - frozen_bytes);

      auto loaded = make(0.5);
      Engine other(rank.world(), *loaded.module, {.config = config});
      ASSERT_TRUE(other.load_checkpoint(folder.path()).has_value());
      other.destroy();
      const std::vector<at::Tensor> parameters = loaded.module->parameters();
      EXPECT_TRUE(parameters[0].eq(0.5).all().item<bool>());
      for (size_t i = 1; i < parameters.size(); ++i) EXPECT_TRUE(parameters[i].eq(0.25).all().item<bool>()) << i;
    });
    EXPECT_SAYS(log.text(),
                "info load_checkpoint: 'some' was saved without frozen parameters; the 1 of this model stay");
  }
}

TEST(Frozen, ParametersThatACheckpointLacksForAnotherReasonAreNamed) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Rank& rank) {
    auto saved = make_mlp();
    Engine engine(rank.world(), *saved.module, {.config = sgd_config(2)});
    engine.save_checkpoint(folder.path());
    auto other = make_mlp();
    other.module->register_parameter("adapter", at::ones({4}), /*requires_grad=*/false);
    Engine loading(rank.world(), *other.module, {.config = sgd_config(2)});
    EXPECT_SAYS(error_of<CheckpointError>([&] { loading.load_checkpoint(folder.path()); }),
                "1 expected and not in the checkpoint: model.adapter");
  });
}

}  // namespace
}  // namespace trireme
