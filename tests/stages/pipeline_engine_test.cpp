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

struct Case {
  const char* schedule;
  int chunks;
  int micro_batches;
};

class PipelineEngineBits : public ::testing::TestWithParam<Case> {};

TEST_P(PipelineEngineBits, AreThoseOfTheModelWithoutStages) {
  for (const int data : {1, 2})
    for (const int stages : {2, 4})
      for (int zero = 0; zero <= 3; ++zero) {
        SCOPED_TRACE(str("stages ", stages, ", data ", data, ", ZeRO ", zero));
        if (stages * GetParam().chunks > 8) continue;
        const Recipe recipe{.data = data,
                            .stages = stages,
                            .micro_batches = GetParam().micro_batches,
                            .schedule = GetParam().schedule,
                            .chunks = GetParam().chunks,
                            .steps = 3,
                            .configure = [&](Config& config) { config.pager.stage = zero; }};
        expect_same_bits(train_whole(recipe), train_in_stages(recipe));
      }
}

INSTANTIATE_TEST_SUITE_P(Schedules, PipelineEngineBits,
                         ::testing::Values(Case{"1f1b", 1, 8}, Case{"gpipe", 1, 8}, Case{"interleaved", 2, 8},
                                           Case{"zb-h1", 1, 8}, Case{"zb-v", 2, 8}, Case{"dualpipe-v", 2, 8}),
                         [](const auto& info) {
                           std::string name = info.param.schedule;
                           std::erase_if(name, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
                           return name;
                         });

}  // namespace
}  // namespace trireme
