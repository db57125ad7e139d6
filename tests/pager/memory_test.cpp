// Bytes that the pager holds, against the closed forms of docs/pager.md.
#include <gtest/gtest.h>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

struct Bytes {
  double weights;    ///< per parameter
  double gradients;  ///< per parameter
};

Bytes closed_form(int stage, int ranks, double weight, double gradient) {
  if (stage == 3) weight /= ranks;
  if (stage >= 2) gradient /= ranks;
  return {weight, gradient};
}

class EveryMemory : public ::testing::TestWithParam<ZeroStage> {
 protected:
  /// 12 * 70 elements: whole numbers of bytes on 1 to 4 ranks, and padding everywhere.
  static constexpr int64_t kNumel = 840;

  void expect_closed_form(at::ScalarType weights, at::ScalarType accumulation) {
    for (const int ranks : {1, 2, 3, 4}) {
      run_ranks(ranks, [&](Rank& rank) {
        PagerPolicy policy = GetParam().policy;
        policy.accumulation_dtype = accumulation;
        Loose net(std::vector<std::vector<int64_t>>{{12, 10}, {12, 20}, {12, 40}});
        net->to(weights);
        Pager pager(rank.world(), named_parameters_of(*net), policy);
        const auto weight_bytes = static_cast<double>(c10::elementSize(weights));
        const auto gradient_bytes = weights == at::kFloat ? 4.0 : static_cast<double>(c10::elementSize(accumulation));
        const Bytes expected = closed_form(policy.stage, ranks, weight_bytes, gradient_bytes);
        const PagerMemory memory = pager.memory();
        int64_t padding = 0;
        for (const UnitLayout& unit : pager.layout().units) padding += unit.padding();
        const double padded = static_cast<double>(kNumel + padding);
        EXPECT_EQ(static_cast<double>(memory.weight_bytes), expected.weights * padded) << ranks;
        EXPECT_EQ(static_cast<double>(memory.gradient_bytes), expected.gradients * padded) << ranks;
        // Each unit's padding of each kind is cut to whole bytes.
        const double states = static_cast<double>(memory.weight_bytes + memory.gradient_bytes - memory.padding_bytes);
        EXPECT_NEAR(states, (expected.weights + expected.gradients) * kNumel, 6) << ranks;
        if (ranks != 3) {
          EXPECT_EQ(states, (expected.weights + expected.gradients) * kNumel) << ranks;
        }
        pager.restore();
      });
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Pager, EveryMemory, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

TEST_P(EveryMemory, OfFp32IsTheClosedForm) { expect_closed_form(at::kFloat, at::kFloat); }
TEST_P(EveryMemory, OfBf16WithBf16AccumulationIsTheClosedForm) { expect_closed_form(at::kBFloat16, at::kBFloat16); }
TEST_P(EveryMemory, OfBf16WithFp32AccumulationIsTheClosedForm) { expect_closed_form(at::kBFloat16, at::kFloat); }

TEST_P(EveryMemory, OfFrozenParametersHasNoGradients) {
  run_ranks(2, [&](Rank& rank) {
    Loose net(std::vector<std::vector<int64_t>>{{64}, {128}});
    (*net)[1].set_requires_grad(false);
    Pager pager(rank.world(), named_parameters_of(*net), GetParam().policy);
    const Bytes expected = closed_form(GetParam().policy.stage, 2, 4, 4);
    EXPECT_EQ(static_cast<double>(pager.memory().weight_bytes), expected.weights * 192);
    EXPECT_EQ(static_cast<double>(pager.memory().gradient_bytes), expected.gradients * 64);
    EXPECT_EQ(pager.owned().size(), 1u);
    EXPECT_EQ(pager.owned_frozen().size(), 1u);
    pager.restore();
  });
}

TEST_P(EveryMemory, InFlightIsNothingBetweenSteps) {
  run_ranks(3, [&](Rank& rank) {
    Chain net(5, 32);
    Pager pager(rank.world(), named_parameters_of(*net), GetParam().policy);
    for (int step = 0; step < 3; ++step) {
      for (int micro = 0; micro < 2; ++micro) {
        net->forward(at::randn({3, 32})).sum().backward();
        pager.end_backward();
      }
      sgd_step(pager, 0.1);
      EXPECT_EQ(pager.memory().in_flight_bytes, 0);
    }
    const bool is_reduced_early = GetParam().policy.stage >= 2;
    EXPECT_EQ(pager.memory().peak_in_flight_bytes > 0, is_reduced_early);
    pager.restore();
  });
}

TEST(PagerMemory, InFlightOfBucketsIsAFewUnitsNotTheModel) {
  for (const int stage : {2, 3}) {
    run_ranks(2, [&](Rank& rank) {
      Chain net(20, 32);
      Pager pager(rank.world(), named_parameters_of(*net),
                  {.stage = stage, .gather = GatherPolicy::kCopy, .units = {.merge_below_bytes = 0}});
      for (int step = 0; step < 2; ++step) {
        net->forward(at::randn({3, 32})).sum().backward();
        pager.end_backward();
        sgd_step(pager, 0.1);
      }
      // Two being reduced, one being filled.
      EXPECT_LE(pager.memory().peak_in_flight_bytes, 3 * 32 * 32 * 4) << stage;
      pager.restore();
    });
  }
}

}  // namespace
}  // namespace trireme
