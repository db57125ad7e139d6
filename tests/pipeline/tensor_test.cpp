// Stages whose layers are cut over ranks: pipeline, data and tensor parallelism together.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/pipeline/pipelines.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/access/parameter_access.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/formats/safetensors.h"

namespace trireme {
namespace {

using pipeline_testing::Outcome;
using pipeline_testing::Recipe;
using pipeline_testing::train_in_stages;
using pipeline_testing::train_whole;

/// The share of a gradient's norm.
constexpr double kOfGradients = 1e-6;

/// Losses and weights relative to their own and to their norm: of AdamW 7.9e-8 and 1.1e-7 are reached, of SGD 1.1e-7
/// and 6.3e-8, so that Adam's division makes nothing greater here.
void expect_parity(const Recipe& recipe, double tolerance = 2.5e-7, int cut_parameters = 12) {
  const Outcome expected = train_whole(recipe), got = train_in_stages(recipe);
  // Each rank has slices of all but the biases of layers that are cut by inputs.
  if (recipe.tensor > 1) {
    EXPECT_EQ(got.cut_parameters, recipe.tensor * (recipe.tied ? 10 : cut_parameters));
  }
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i)
    EXPECT_NEAR(got.losses[i], expected.losses[i], tolerance * expected.losses[i]) << "step " << i;
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (const auto& [name, weight] : expected.weights) {
    ASSERT_TRUE(got.weights.contains(name)) << name;
    ASSERT_EQ(got.weights.at(name).sizes(), weight.sizes()) << name;
    EXPECT_LE((got.weights.at(name) - weight).norm().item<double>(), tolerance * weight.norm().item<double>()) << name;
  }
  ASSERT_EQ(got.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients)
    EXPECT_LE((got.gradients.at(name) - gradient).norm().item<double>(), kOfGradients * gradient.norm().item<double>())
        << name;
}

/// Layers are cut by outputs and by inputs in turn, so that a stage may end with an output that is a slice.
PartitionConfig by_turns() {
  using enum TensorLayerSpec::Type;
  return {.layer_specs = {{.patterns = {"[01357]\\..*"}, .type = kColumn}, {.patterns = {"[246]\\..*"}, .type = kRow}}};
}

Recipe cut_stages(int data, int zero, const std::string& schedule = "1f1b") {
  return {
      .data = data, .stages = 2, .tensor = 2, .schedule = schedule, .steps = 4, .configure = [zero](Config& config) {
        config.pager.stage = zero;
        config.tensor.partition_config = by_turns();
      }};
}

TEST(StagesOfSlices, TrainAsOneProcess) {
  for (int zero = 0; zero <= 3; ++zero) {
    SCOPED_TRACE(str("ZeRO ", zero));
    expect_parity(cut_stages(1, zero));
  }
}

/// A layer that is cut by inputs ends a stage, so that some tokens of each rank leave it: of three tokens one rank has
/// two.
Recipe stages_of_sharded_tokens(int zero, const std::string& schedule = "1f1b") {
  Recipe recipe = cut_stages(1, zero, schedule);
  recipe.takes_sizes_from_inputs = recipe.keeps_gradients = true;
  recipe.configure = [zero](Config& config) {
    using enum TensorLayerSpec::Type;
    config.pager.stage = zero;
    config.tensor.partition_config = PartitionConfig{
        .layer_specs = {{.patterns = {"[0246]\\..*"}, .type = kColumn}, {.patterns = {"[1357]\\..*"}, .type = kRow}}};
    config.tensor.sequence_parallel = config.degrees.tensor > 1;
  };
  return recipe;
}

void expect_parity_of_sharded_tokens(const Recipe& recipe) { expect_parity(recipe, 2.5e-7, /*cut_parameters=*/11); }

TEST(StagesOfSlices, HandOnSomeTokensOfEachRank) {
  for (const int zero : {0, 1, 3}) {
    SCOPED_TRACE(str("ZeRO ", zero));
    expect_parity_of_sharded_tokens(stages_of_sharded_tokens(zero));
  }
  for (const char* schedule : {"gpipe", "interleaved", "zb-h1", "zb-v"}) {
    SCOPED_TRACE(schedule);
    expect_parity_of_sharded_tokens(stages_of_sharded_tokens(1, schedule));
  }
}

TEST(StagesOfSlices, RecomputeLayersOfSomeTokens) {
  for (const int zero : {0, 1}) {
    SCOPED_TRACE(str("ZeRO ", zero));
    Recipe recipe = stages_of_sharded_tokens(zero);
    recipe.recomputed_layers = 2;
    expect_parity_of_sharded_tokens(recipe);
  }
}

TEST(StagesOfSlices, OfSomeTokensBesideDataParallelRanks) {
  Recipe recipe = stages_of_sharded_tokens(1);
  recipe.data = 2;
  expect_parity_of_sharded_tokens(recipe);
}

/// Each rank's own tokens come to the second stage.
TEST(StagesOfSlices, DoNotGatherTokensBetweenThem) {
  std::map<int64_t, int> times;  // by the tokens that a rank has
  std::mutex mutex;
  Recipe recipe = stages_of_sharded_tokens(0);
  recipe.steps = 1;
  recipe.change_layers = [&](std::vector<LayerSpec> layers) {
    layers.at(4).forward = [&, forward = layers.at(4).forward](torch::nn::Module* module, const c10::IValue& value) {
      {
        const std::lock_guard lock(mutex);
        const at::Tensor x = value.toTensor();
        PartTensor* const part = PartTensor::of(x);
        ++times[(part != nullptr ? part->local() : x).size(1)];
        EXPECT_EQ(x.size(1), pipeline_testing::kLength) << "and a layer sees all";
      }
      return forward(module, value);
    };
    return layers;
  };
  train_in_stages(recipe);
  EXPECT_EQ(times, (std::map<int64_t, int>{{1, recipe.micro_batches}, {2, recipe.micro_batches}}));
}

/// On every rank, before it trains.
TEST(StagesOfSlices, OfSomeTokensAreRefusedForLayersThatReadSizes) {
  std::atomic<int> refused = 0;
  run_ranks(4, [&](Rank& rank) {
    const Recipe recipe = stages_of_sharded_tokens(0);
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    EXPECT_SAYS(testing::error_of([&] {
                  trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 4)});
                }),
                "InitializeOptions::takes_sizes_from_inputs");
    ++refused;
  });
  EXPECT_EQ(refused, 4);
}

TEST(StagesOfSlices, OfTiedLayers) {
  for (const int zero : {0, 3}) {
    SCOPED_TRACE(str("ZeRO ", zero));
    Recipe recipe = cut_stages(1, zero);
    recipe.tied = true;
    expect_parity(recipe);
  }
}

TEST(StagesOfSlices, BesideDataParallelRanks) {
  for (const int zero : {1, 3}) {
    SCOPED_TRACE(str("ZeRO ", zero));
    expect_parity(cut_stages(2, zero));
  }
}

/// Calls `look` on each rank with the engine of `recipe` after `steps` steps from the checkpoint in `from`, if it is
/// named.
template <class Look>
void after_steps(const Recipe& recipe, const std::filesystem::path& from, int steps, const Look& look) {
  run_ranks(recipe.data * recipe.stages * recipe.tensor, [&](Rank& rank) {
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    auto engine =
        trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, rank.size())});
    if (!from.empty()) engine.load_checkpoint(from);
    const MicroBatches batches = pipeline_testing::batches_of(engine.group().rank());
    for (int step = 0; step < steps; ++step) engine.train_batch(batches);
    look(rank, engine);
  });
}

/// Steps of `recipe` from the checkpoint in `from`, if it is named, saved in `to`; and its exported weights.
Outcome go_on(const Recipe& recipe, const std::filesystem::path& from, const std::filesystem::path& to, int steps) {
  Outcome outcome;
  std::mutex mutex;
  after_steps(recipe, from, steps, [&](Rank&, PipelineEngine& engine) {
    engine.save_checkpoint(to);
    engine.save_16bit_model(to);
    const bool is_first = engine.group().rank() == 0;
    auto weights = pipeline_testing::weights_after(engine);
    const std::lock_guard lock(mutex);
    if (is_first) outcome.weights.merge(weights);
  });
  return outcome;
}

Recipe layout(int stages, int data, int tensor, int zero) {
  Recipe recipe = cut_stages(data, zero);
  recipe.stages = stages;
  recipe.tensor = tensor;
  recipe.tied = true;
  recipe.configure = [zero, tensor](Config& config) {
    config.pager.stage = zero;
    if (tensor > 1) config.tensor.partition_config = by_turns();
  };
  return recipe;
}

std::vector<Recipe> eight_layouts() {
  return {layout(2, 1, 2, 1), layout(1, 1, 1, 0), layout(2, 2, 2, 3), layout(2, 1, 1, 2),
          layout(1, 2, 2, 3), layout(2, 1, 2, 0), layout(1, 1, 2, 1), layout(2, 2, 1, 3)};
}

/// Each layout loads what the one before has saved, and has its bits; the last one's are those of the first.
TEST(StagesOfSlices, HaveTheBitsOfAnyOtherLayoutsCheckpoint) {
  const std::vector<Recipe> layouts = eight_layouts();
  const testing::TemporaryFolder folder;
  const auto saved = [&](size_t i) { return folder.path() / str("layout", i); };
  const Outcome first = go_on(layouts[0], {}, saved(0), 2);
  for (size_t i = 1; i < layouts.size(); ++i) {
    SCOPED_TRACE(str("layout ", i));
    const Outcome got = go_on(layouts[i], saved(i - 1), saved(i), 0);
    ASSERT_EQ(got.weights.size(), first.weights.size());
    for (const auto& [name, weight] : first.weights) EXPECT_TRUE(at::equal(got.weights.at(name), weight)) << name;
    const auto exported = read_safetensors(saved(i) / "model.safetensors");
    for (const auto& [name, weight] : exported)
      if (const auto found = first.weights.find(name); found != first.weights.end()) {
        EXPECT_TRUE(at::equal(weight, found->second)) << name;
      }
    EXPECT_GE(exported.size(), first.weights.size());
  }
  // And with their optimizer's states: a step from each is a step from the first.
  const Outcome from_first = go_on(layouts[1], saved(0), folder.path() / "a", 1);
  const Outcome from_last = go_on(layouts[1], saved(layouts.size() - 1), folder.path() / "b", 1);
  for (const auto& [name, weight] : from_first.weights)
    EXPECT_TRUE(at::equal(from_last.weights.at(name), weight)) << name;
}

/// Weights and the optimizer's states by parameter and kind, whole, as they are saved.
using States = std::map<std::string, at::Tensor>;

/// Those of all stages after `steps` steps from the checkpoint in `from`, if it is named; saved in `to`, if it is
/// named.
States states_after(const Recipe& recipe, const std::filesystem::path& from, const std::filesystem::path& to,
                    int steps) {
  States states;
  std::mutex mutex;
  after_steps(recipe, from, steps, [&](Rank& rank, PipelineEngine& engine) {
    if (!to.empty()) engine.save_checkpoint(to);
    for (const auto& item : engine.module().named_parameters()) {
      if (!find_managed(item.value())) continue;  // a copy of another stage's
      States own = {{item.key(), *safe_get_full_fp32_param(item.value())}};
      for (const char* kind : {"exp_avg", "exp_avg_sq"})
        own[str(item.key(), ", ", kind)] = *safe_get_full_optimizer_state(item.value(), kind);
      const std::lock_guard lock(mutex);
      for (const auto& [name, values] : own) {  // of every rank, also of those that have others' replicas
        const auto [known, is_new] = states.try_emplace(name, values.clone());
        EXPECT_TRUE(is_new || at::equal(known->second, values)) << name << " is another on rank " << rank.id();
      }
    }
    engine.destroy();
  });
  return states;
}

/// Eight layouts, each of which trains and saves by itself; what each other layout loads from it has its bits.
class AnyTwoLayouts : public ::testing::TestWithParam<int> {};

void expect_bits_of_layout(int saver, const std::vector<int>& loaders) {
  const std::vector<Recipe> layouts = eight_layouts();
  const testing::TemporaryFolder folder;
  const States saved = states_after(layouts[saver], {}, folder.path(), 2);
  EXPECT_EQ(saved.size(), 3 * 13);  // the embedding, and weights and biases of six layers
  for (const int loader : loaders) {
    SCOPED_TRACE(str("saved by layout ", saver, ", loaded by ", loader));
    const States loaded = states_after(layouts[loader], folder.path(), {}, 0);
    ASSERT_EQ(loaded.size(), saved.size());
    for (const auto& [name, values] : saved) EXPECT_TRUE(at::equal(loaded.at(name), values)) << name;
  }
}

TEST_P(AnyTwoLayouts, HaveTheSameBits) {
  std::vector<int> others;
  for (int loader = 0; loader < 8; ++loader)
    if (loader != GetParam()) others.push_back(loader);
  expect_bits_of_layout(GetParam(), others);
}
INSTANTIATE_TEST_SUITE_P(Slow, AnyTwoLayouts, ::testing::Range(0, 8));

/// A few of the 56 pairs: the layouts with all three axes and with one rank, each of which loads the other.
TEST(TwoLayouts, HaveTheSameBits) {
  expect_bits_of_layout(2, {1, 7});
  expect_bits_of_layout(1, {2});
}

/// Ranks that share layers and got other samples have other losses.
TEST(StagesOfSlices, ThatGetOtherSamplesAreRefused) {
  std::mutex mutex;
  std::vector<std::string> told;
  run_ranks(4, [&](Rank& rank) {
    const Recipe recipe = cut_stages(1, 1);
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    auto engine = trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 4)});
    const std::string error =
        testing::error_of([&] { engine.train_batch(pipeline_testing::batches_of(rank.id() % 2)); });
    const std::lock_guard lock(mutex);
    told.push_back(error);
  });
  EXPECT_EQ(std::ranges::count_if(
                told, [](const std::string& text) { return text.find("so have one loss") != std::string::npos; }),
            4)
      << told[0] << "\n"
      << told[1] << "\n"
      << told[2] << "\n"
      << told[3];
}

/// A layer that fails on one rank ends those that share it, too, and the other stage.
TEST(StagesOfSlices, OfWhichOneFailsEndOnEveryRank) {
  std::atomic<int> ended = 0;
  run_ranks(4, [&](Rank& rank) {
    Recipe recipe = cut_stages(1, 1);
    recipe.change_layers = [&](std::vector<LayerSpec> layers) {
      const auto forward = layers[5].forward;
      layers[5].forward = [forward, fails = rank.id() == 3](torch::nn::Module* module, const c10::IValue& value) {
        if (fails) throw std::runtime_error("one has had enough");
        return forward(module, value);
      };
      return layers;
    };
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    auto engine = trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 4)});
    EXPECT_SAYS(testing::error_of([&] { engine.train_batch(pipeline_testing::batches_of(0)); }), "one has had enough");
    ++ended;
  });
  EXPECT_EQ(ended, 4);
}

/// A gradient that one slice of the last stage has otherwise ends the step on the first stage, too.
TEST(StagesOfSlices, OfWhichOneHasAnotherGradientEndOnEveryRank) {
  std::mutex mutex;
  std::vector<std::string> told;
  run_ranks(4, [&](Rank& rank) {
    Recipe recipe = cut_stages(1, 1);
    recipe.change_layers = [&](std::vector<LayerSpec> layers) {
      if (rank.id() != 3) return layers;
      layers[6].make = [make = layers[6].make] {
        const auto module = make();
        dynamic_cast<torch::nn::LinearImpl&>(*module).bias.register_hook([](const at::Tensor& own) { return own * 2; });
        return module;
      };
      return layers;
    };
    PipelineModule module = pipeline_testing::pipeline_of(recipe);
    auto engine = trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 4)});
    const std::string error = testing::error_of([&] { engine.train_batch(pipeline_testing::batches_of(0)); });
    const std::lock_guard lock(mutex);
    told.push_back(error);
  });
  const auto count = [&](const char* words) {
    return std::ranges::count_if(told, [=](const std::string& text) { return text.find(words) != std::string::npos; });
  };
  EXPECT_EQ(count("have the same elements of \"6.bias\" and other gradients of them"), 2) << told[0] << told[3];
  EXPECT_EQ(count("gradients are wrong, as other ranks of the model say"), 2) << told[0] << told[3];
}

/// Two stages, each of two replicas of two shards, with and without slices.
TEST(StagesOfReplicas, TrainAsOneProcess) {
  for (const int zero : {1, 2, 3}) {
    SCOPED_TRACE(str("ZeRO ", zero));
    Recipe recipe = cut_stages(4, zero);
    recipe.tensor = 1;
    recipe.tied = true;
    recipe.configure = [zero](Config& config) {
      config.pager.stage = zero;
      if (config.degrees.pipe > 1) config.degrees.replicas = 2;
    };
    expect_parity(recipe);
  }
}

TEST(StagesOfSlices, UnderEverySchedule) {
  for (const char* schedule : {"gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"}) {
    SCOPED_TRACE(schedule);
    Recipe recipe = cut_stages(1, 1, schedule);
    recipe.tied = true;
    expect_parity(recipe);
  }
}

}  // namespace
}  // namespace trireme
