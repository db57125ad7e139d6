// A model in stages has the bits of the model without: losses and weights.
#include "trireme/pipeline/pipeline_engine.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/pipeline/pipelines.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/file.h"
#include "trireme/pipeline/layer_profile.h"

namespace trireme {
namespace {

using pipeline_testing::Outcome;
using pipeline_testing::Recipe;
using pipeline_testing::train_in_stages;
using pipeline_testing::train_whole;

void expect_same_bits(const Outcome& expected, const Outcome& got) {
  EXPECT_EQ(got.losses, expected.losses);
  ASSERT_EQ(got.weights.size(), expected.weights.size());
  for (const auto& [name, weight] : expected.weights) {
    ASSERT_TRUE(got.weights.contains(name)) << name;
    EXPECT_TRUE(at::equal(got.weights.at(name), weight)) << name;
  }
}

class PipelineEngineBits : public ::testing::TestWithParam<const char*> {};

TEST_P(PipelineEngineBits, AreThoseOfTheModelWithoutStages) {
  for (const int data : {1, 2})
    for (const int stages : {2, 4})
      for (int zero = 0; zero <= 3; ++zero) {
        SCOPED_TRACE(str("stages ", stages, ", data ", data, ", ZeRO ", zero));
        const Recipe recipe{.data = data,
                            .stages = stages,
                            .micro_batches = 8,
                            .schedule = GetParam(),
                            .steps = 10,
                            .configure = [&](Config& config) { config.pager.stage = zero; }};
        expect_same_bits(train_whole(recipe), train_in_stages(recipe));
      }
}

INSTANTIATE_TEST_SUITE_P(Schedules, PipelineEngineBits,
                         ::testing::Values("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                           return name;
                         });

// Each of the six linear layers has 24 rows (4 micro-batches of 2 samples of 3 tokens) by 8 x 8 weights: 3072 FLOPs.
TEST(PipelineEngineProfile, HasTheWorkOfEachStageAndTheBitsWithout) {
  const TemporaryFolder folder;
  Recipe recipe{.stages = 2, .steps = 3};
  const Outcome plain = train_in_stages(recipe);
  recipe.configure = [&](Config& config) {
    config.flops_profiler = {.enabled = true, .output_file = (folder / "profile.txt").string()};
  };
  expect_same_bits(plain, train_in_stages(recipe));
  const std::string text = posix_file_system().read(folder / "profile.txt");
  const size_t first = text.find("FLOPs profile of stage 0 at step 1\n");
  const size_t second = text.find("FLOPs profile of stage 1 at step 1\n");
  ASSERT_LT(first, second) << text;
  ASSERT_LT(second, text.size());
  EXPECT_NE(text.substr(first, second).find("in all 4 micro-batches"), std::string::npos);
  int linear_layers = 0;
  for (size_t at = text.find("LinearImpl: 72 = "); at != std::string::npos;
       at = text.find("LinearImpl: 72 = ", at + 1)) {
    EXPECT_NE(text.substr(at, 60).find(", 3.07 kFLOP = "), std::string::npos) << text.substr(at, 60);
    ++linear_layers;
  }
  EXPECT_EQ(linear_layers, 6) << text;
}

TEST(PipelineModuleParts, AreOfEqualCost) {
  std::vector<LayerSpec> layers(8, layer_of([](const at::Tensor& x) { return x; }));
  for (size_t i = 0; i < layers.size(); ++i) layers[i].cost = i == 7 ? 3.5 : 1;  // 10.5 in all
  PipelineModuleOptions cut;
  cut.stages = 2;
  cut.partition_method = "best";
  cut.loss = [](const c10::IValue& output, const c10::IValue&) { return output.toTensor(); };
  EXPECT_EQ(PipelineModule(layers, cut).parts(), (std::vector<int64_t>{0, 5, 8}));
}

LayerSpec repeated_product(int times) {
  LayerSpec spec = layer<torch::nn::LinearImpl>(64, 64);
  spec.forward = [times](torch::nn::Module* module, const c10::IValue& value) {
    at::Tensor x = value.toTensor();
    for (int i = 0; i < times; ++i) x = static_cast<torch::nn::LinearImpl*>(module)->forward(x);
    return c10::IValue(x);
  };
  return spec;
}

TEST(PipelineModuleParts, AreOfEqualProfiledTimesWithinTheMemoryOfAStage) {
  std::vector<LayerProfile> profiles(6, {.seconds = 1e-3, .parameter_bytes = 10, .activation_bytes = 5});  // 50 bytes
  profiles.push_back({.seconds = 6e-3, .parameter_bytes = 10, .activation_bytes = 5});
  PipelineModuleOptions cut;
  cut.stages = 2;
  EXPECT_EQ(partition_profiled(profiles, cut), (std::vector<int64_t>{0, 6, 7}));
  cut.memory_limit = 250;  // of five layers
  EXPECT_EQ(partition_profiled(profiles, cut), (std::vector<int64_t>{0, 5, 7}));
}

TEST(PipelineModuleParts, AreMeasuredByProfile) {
  at::set_num_threads(1);  // threads that wait for each other take most of the time
  std::vector<LayerSpec> layers(6, repeated_product(1));
  layers.push_back(repeated_product(20));
  PipelineModuleOptions cut;
  cut.stages = 2;
  cut.partition_method = "profile";
  cut.profile_input = at::ones({32, 64});
  cut.loss = [](const c10::IValue& output, const c10::IValue&) { return output.toTensor().sum(); };
  EXPECT_EQ(PipelineModule(layers, cut).parts().back(), 7);

  const std::vector<LayerProfile> profiles = profile_layers(layers, cut.profile_input);
  EXPECT_EQ(profiles[0].parameter_bytes, 4 * (64 * 64 + 64));
  EXPECT_EQ(profiles[0].activation_bytes, 4 * 32 * 64);  // its outputs, which the next one keeps as inputs
  EXPECT_EQ(profiles[6].activation_bytes, 20 * profiles[0].activation_bytes);
  for (const LayerProfile& profile : profiles) EXPECT_GT(profile.seconds, 0);

  cut.memory_limit = 100;
  EXPECT_SAYS(testing::error_of<ConfigError>([&] { (void)PipelineModule(layers, cut).parts(); }),
              "no partition over 2 stages stays within 100 bytes");
  cut.profile_input = at::ones({32, 63});
  EXPECT_SAYS(testing::error_of<ConfigError>([&] { (void)PipelineModule(layers, cut).parts(); }),
              "layer 0, torch::nn::LinearImpl, failed on profile_input");
  cut.profile_input = {};
  EXPECT_SAYS(testing::error_of<ConfigError>([&] { (void)PipelineModule(layers, cut).parts(); }), "set profile_input");
}

TEST(PipelineModuleParts, ThatAreMeasuredAreRank0s) {
  Recipe recipe{.stages = 2, .steps = 2};
  const Outcome expected = train_whole(recipe);
  run_ranks(2, [&](Rank& rank) {
    PipelineModuleOptions cut = pipeline_testing::pipeline_of(recipe).options();
    cut.partition_method = "profile";
    cut.profile_input = pipeline_testing::tokens_of(0, 0).narrow(1, 0, pipeline_testing::kLength);
    PipelineModule module(pipeline_testing::layers_of(recipe), cut);
    auto engine = trireme::initialize(rank.world(), module, {.config = pipeline_testing::config_of(recipe, 2)});
    const MicroBatches batches = pipeline_testing::batches_of(0);
    for (const float loss : expected.losses) EXPECT_EQ(engine.train_batch(batches).item<float>(), loss);
  });
}

}  // namespace
}  // namespace trireme
