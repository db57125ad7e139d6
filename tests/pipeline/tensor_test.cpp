// Stages whose layers are cut over ranks: pipeline, data and tensor parallelism together.
#include <gtest/gtest.h>

#include "tests/pipeline/pipelines.h"
#include "tests/support/error_of.h"

namespace trireme {
namespace {

using pipeline_testing::Outcome;
using pipeline_testing::Recipe;
using pipeline_testing::train_in_stages;
using pipeline_testing::train_whole;

void expect_parity(const Recipe& recipe, double tolerance = 1e-5) {
  const Outcome expected = train_whole(recipe), got = train_in_stages(recipe);
  // Each rank has slices of all but the biases of layers that are cut by inputs.
  if (recipe.tensor > 1) {
    EXPECT_EQ(got.cut_parameters, recipe.tensor * (recipe.tied ? 10 : 12));
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
}

/// Layers are cut by outputs and by inputs in turn, so that a stage may end with an output that is a slice.
PartitionConfig by_turns() {
  using enum TensorLayerSpec::Type;
  return {.layer_specs = {{.patterns = {"[0135]\\..*", "7\\..*"}, .type = kColumn},
                          {.patterns = {"[246]\\..*"}, .type = kRow}}};
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
