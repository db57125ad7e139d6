// A model in stages has the bits of the model without: losses and weights.
#include "trireme/stages/pipeline_engine.h"

#include <gtest/gtest.h>

#include "tests/stages/pipelines.h"

namespace trireme {
namespace {

using stages_testing::Outcome;
using stages_testing::Recipe;
using stages_testing::train_in_stages;
using stages_testing::train_whole;

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

TEST(PipelineModuleParts, AreOfEqualCost) {
  std::vector<LayerSpec> layers(8, layer_of([](const at::Tensor& x) { return x; }));
  for (size_t i = 0; i < layers.size(); ++i) layers[i].cost = i == 7 ? 3.5 : 1;  // 10.5 in all
  PipelineModuleOptions cut;
  cut.stages = 2;
  cut.partition_method = "best";
  cut.loss = [](const c10::IValue& output, const c10::IValue&) { return output.toTensor(); };
  EXPECT_EQ(PipelineModule(layers, cut).parts(), (std::vector<int64_t>{0, 5, 8}));
}

}  // namespace
}  // namespace trireme
