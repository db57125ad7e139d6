// Options of a PipelineModule: any of them gives the losses and weights of the model in one stage.
#include <gtest/gtest.h>

#include <ATen/ops/arange.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>

#include <atomic>
#include <mutex>
#include <set>

#include "tests/pipeline/pipelines.h"
#include "tests/support/error_of.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/recompute/recompute.h"

namespace trireme {
namespace {

using pipeline_testing::Outcome;
using pipeline_testing::Recipe;
using pipeline_testing::train_in_stages;

/// Two stages have the bits of one.
void expect_bits_of_one_stage(Recipe recipe) {
  recipe.steps = 3;
  recipe.stages = 1;
  const Outcome whole = train_in_stages(recipe);
  recipe.stages = 2;
  const Outcome staged = train_in_stages(recipe);
  EXPECT_EQ(staged.losses, whole.losses);
  ASSERT_EQ(staged.weights.size(), whole.weights.size());
  for (const auto& [name, weight] : whole.weights) EXPECT_TRUE(at::equal(staged.weights.at(name), weight)) << name;
}

TEST(ModuleOptions, DynamicShapeLetsLengthsChangeFromOneMicroBatchToTheNext) {
  expect_bits_of_one_stage(
      {.change_options = [](PipelineModuleOptions& options) { options.dynamic_shape = true; },
       .batches = [](int data_rank) -> MicroBatches {
         return [data_rank, number = int64_t{0}]() mutable {
           const int64_t length = 1 + number % 3;
           const at::Tensor tokens = pipeline_testing::tokens_of(data_rank, number++);
           return std::optional(MicroBatch{tokens.narrow(1, 0, length), tokens.narrow(1, 1, length)});
         };
       }});
}

TEST(ModuleOptions, SeedFnMakesTheSameLayersHoweverTheyAreCut) {
  std::mutex mutex;
  std::set<int64_t> seeds;
  expect_bits_of_one_stage({.change_layers =
                                [](std::vector<LayerSpec> layers) {
                                  layers[3] = layer<torch::nn::LinearImpl>(pipeline_testing::kHidden,
                                                                           pipeline_testing::kHidden);
                                  return layers;
                                },
                            .change_options =
                                [&](PipelineModuleOptions& options) {
                                  options.seed_layers = true;
                                  options.base_seed = 50;
                                  options.seed_fn = [&](int64_t seed) {
                                    const std::lock_guard lock(mutex);
                                    seeds.insert(seed);
                                    manual_seed(static_cast<uint64_t>(seed));
                                  };
                                }});
  EXPECT_EQ(seeds, (std::set<int64_t>{50, 51, 52, 53, 54, 55, 56, 57}));
}

TEST(ModuleOptions, ActivationCheckpointFuncRecomputesTheLayersThatAreNamed) {
  for (const bool all : {true, false}) {
    SCOPED_TRACE(all);
    std::atomic<int> calls = 0, runs = 0;
    const Recipe plain{.steps = 2};
    Recipe recipe = plain;
    recipe.recomputed_layers = 1;
    recipe.change_options = [&](PipelineModuleOptions& options) {
      if (!all) options.checkpointable_layers = {"LinearImpl"};
      options.activation_checkpoint_func = [&](const StageModel::Part& compute, const c10::IValue& input) {
        ++calls;
        const auto run = [&runs, compute](const std::vector<at::Tensor>& tensors) {
          ++runs;
          return compute(tensors[0]);
        };
        return recompute(RecomputeOptions{}, run, {input.toTensor()});
      };
    };
    const Outcome expected = train_in_stages(plain), got = train_in_stages(recipe);
    EXPECT_EQ(got.losses, expected.losses);
    for (const auto& [name, weight] : expected.weights) EXPECT_TRUE(at::equal(got.weights.at(name), weight)) << name;
    EXPECT_EQ(calls, plain.steps * plain.micro_batches * (all ? 8 : 7));  // the embedding is no Linear
    EXPECT_EQ(runs, 2 * calls);
  }
}

TEST(ModuleOptions, CheckpointableLayersThatAreNoLayersClassAreRefused) {
  const Recipe recipe{.change_options = [](PipelineModuleOptions& options) {
    options.checkpointable_layers = {"Linear", "Block"};
  }};
  EXPECT_SAYS(testing::error_of<ConfigError>([&] { (void)pipeline_testing::pipeline_of(recipe); }),
              "checkpointable_layers has 'Block', which is the class of no layer; there are 'Embedding', 'Linear'");
}

TEST(ModuleOptions, ASequentialIsCutIntoItsLayers) {
  const auto model_of = [] {
    manual_seed(3);
    return torch::nn::Sequential(torch::nn::Linear(4, 6), torch::nn::Tanh(), torch::nn::Linear(6, 6), torch::nn::ReLU(),
                                 torch::nn::Linear(6, 2));
  };
  const auto input_of = [](int64_t number) { return at::arange(8, at::kFloat).view({2, 4}) / 8 - 0.1 * number; };
  const auto config_for = [](int stages) {
    Config config = default_config(stages, {.pipe = stages});
    config.optimizer = {.kind = OptimizerKind::kAdamW, .lr = 0.02};
    config.batch = {.train_batch_size = 8, .train_micro_batch_size_per_gpu = 2, .gradient_accumulation_steps = 4};
    return config;
  };
  std::map<int, std::vector<float>> losses;
  std::map<int, std::map<std::string, at::Tensor>> weights;
  std::mutex mutex;
  for (const int stages : {1, 2})
    run_ranks(stages, [&](Rank& rank) {
      // Ranks are threads here: the generator is the rank's own.
      PipelineModule module(model_of(),
                            {.stages = stages, .loss = [](const c10::IValue& outputs, const c10::IValue& labels) {
                               return at::mse_loss(outputs.toTensor(), labels.toTensor());
                             }});
      auto engine = trireme::initialize(rank.world(), module, {.config = config_for(stages)});
      for (int step = 0; step < 2; ++step) {
        const at::Tensor loss = engine.train_batch([&, number = int64_t{0}]() mutable {
          return std::optional(MicroBatch{input_of(number++), at::zeros({2, 2})});
        });
        if (rank.id() == 0) losses[stages].push_back(loss.item<float>());
      }
      auto own = pipeline_testing::weights_of(engine);
      const std::lock_guard lock(mutex);
      weights[stages].merge(own);
    });
  EXPECT_EQ(losses[1], losses[2]);
  ASSERT_EQ(weights[1].size(), 6);
  for (const auto& [name, weight] : weights[1]) EXPECT_TRUE(at::equal(weight, weights[2].at(name))) << name;
  EXPECT_TRUE(weights[1].contains("4.bias"));
  auto plain = model_of();
  float expected = 0;
  for (int64_t number = 0; number < 4; ++number)
    expected += at::mse_loss(plain->forward(input_of(number)), at::zeros({2, 2})).item<float>() / 4;
  EXPECT_NEAR(losses[1][0], expected, 1e-6);  // a sum in another order
}

}  // namespace
}  // namespace trireme
