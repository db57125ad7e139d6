// Closed forms and tables computed by hand; for DeepSpeed's warm-ups i = max(applied_steps - 1, 0).
#include "trireme/optim/lr_schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>
#include <string>
#include <vector>

#include "trireme/base/error.h"

namespace trireme {
namespace {

TEST(LrSchedule, ConstantIsTheOptimizersLearningRate) {
  const LrSchedule schedule({}, 0.25);
  EXPECT_EQ(schedule.lr(0), 0.25);
  EXPECT_EQ(schedule.lr(1'000'000), 0.25);
}

TEST(LrSchedule, WarmupLrRisesWithTheLogarithmOfTheStepThenStays) {
  const LrSchedule schedule(
      {.kind = LrScheduleKind::kWarmup, .warmup_min_lr = 0.1, .warmup_max_lr = 1.1, .warmup_num_steps = 100}, 7.0);
  EXPECT_DOUBLE_EQ(schedule.lr(0), 0.1);
  EXPECT_DOUBLE_EQ(schedule.lr(1), 0.1);
  EXPECT_DOUBLE_EQ(schedule.lr(10), 0.1 + std::log(10.0) / std::log(100.0));  // i + 1 = 10: half of the way
  EXPECT_DOUBLE_EQ(schedule.lr(10), 0.6);
  EXPECT_DOUBLE_EQ(schedule.lr(101), 1.1);
  EXPECT_DOUBLE_EQ(schedule.lr(5000), 1.1);
}

TEST(LrSchedule, WarmupLrWithoutAMaximumEndsAtTheOptimizersLearningRate) {
  const LrSchedule schedule(
      {.kind = LrScheduleKind::kWarmup, .warmup_num_steps = 10, .warmup_type = WarmupKind::kLinear}, 0.5);
  EXPECT_DOUBLE_EQ(schedule.lr(6), 0.25);
  EXPECT_DOUBLE_EQ(schedule.lr(11), 0.5);
}

TEST(LrSchedule, WarmupOfZeroStepsLastsTwo) {
  const LrSchedule schedule({.kind = LrScheduleKind::kWarmup, .warmup_num_steps = 0}, 1.0);
  EXPECT_DOUBLE_EQ(schedule.lr(0), 0);
  EXPECT_DOUBLE_EQ(schedule.lr(2), 1.0);  // ln 2 / ln 2
}

TEST(LrSchedule, WarmupDecayLrFallsLinearlyToTheMinimumAtTheLastStep) {
  const LrSchedule schedule({.kind = LrScheduleKind::kWarmupDecay,
                             .warmup_min_lr = 0.1,
                             .warmup_max_lr = 1.1,
                             .warmup_num_steps = 20,
                             .warmup_type = WarmupKind::kLinear,
                             .total_num_steps = 120},
                            7.0);
  EXPECT_DOUBLE_EQ(schedule.lr(11), 0.6);  // i = 10 of 20
  EXPECT_DOUBLE_EQ(schedule.lr(21), 1.1);  // i = 20: all 100 are left
  EXPECT_DOUBLE_EQ(schedule.lr(71), 0.6);  // i = 70: 50 of 100 are left
  EXPECT_DOUBLE_EQ(schedule.lr(121), 0.1);
  EXPECT_DOUBLE_EQ(schedule.lr(5000), 0.1);  // and no further
}

TEST(LrSchedule, WarmupCosineLrFollowsHalfAWaveAndStaysAtItsEnd) {
  const LrSchedule schedule({.kind = LrScheduleKind::kWarmupCosine,
                             .warmup_num_steps = 10,
                             .warmup_type = WarmupKind::kLinear,
                             .total_num_steps = 110,
                             .warmup_min_ratio = 0.2,
                             .cos_min_ratio = 0.1},
                            2.0);
  EXPECT_DOUBLE_EQ(schedule.lr(0), 0.4);
  EXPECT_DOUBLE_EQ(schedule.lr(6), 2.0 * (0.2 + 0.8 * 0.5));  // i = 5
  EXPECT_DOUBLE_EQ(schedule.lr(11),
                   2.0 * (0.1 + 0.9 * (1 + std::cos(std::numbers::pi / 100)) / 2));  // i = 10: one after it
  EXPECT_NEAR(schedule.lr(60), 2.0 * (0.1 + 0.9 * 0.5), 1e-15);                      // half of the wave
  EXPECT_DOUBLE_EQ(schedule.lr(110), 0.2);
  EXPECT_DOUBLE_EQ(schedule.lr(180), 0.2);  // the wave would have risen again
}

/// The learning rate after 0, 1, 2, … applied steps.
void expect_table(const LrSchedule& schedule, const std::vector<double>& expected) {
  for (size_t applied = 0; applied < expected.size(); ++applied)
    EXPECT_DOUBLE_EQ(schedule.lr(static_cast<int64_t>(applied)), expected[applied]) << "after " << applied << " steps";
}

TEST(LrSchedule, LrRangeTestGrowsByItsRateOverEveryInterval) {
  const LrRangeTestOptions test{.min_lr = 0.5, .step_size = 4, .step_rate = 2};
  expect_table({{.kind = LrScheduleKind::kLrRangeTest, .lr_range_test = test}, 7.0}, {0.5, 0.75, 1, 1.25, 1.5, 1.75});
}

TEST(LrSchedule, LrRangeTestWithAStaircaseGrowsAtTheEndOfAnInterval) {
  const LrRangeTestOptions test{.min_lr = 0.5, .step_size = 3, .step_rate = 2, .staircase = true};
  expect_table({{.kind = LrScheduleKind::kLrRangeTest, .lr_range_test = test}, 7.0},
               {0.5, 0.5, 0.5, 1.5, 1.5, 1.5, 2.5, 2.5});
}

TEST(LrSchedule, OneCycleRisesFallsAndThenDecays) {
  const OneCycleOptions cycle{.cycle_min_lr = 1,
                              .cycle_max_lr = 5,
                              .decay_lr_rate = 0.5,
                              .cycle_first_step_size = 4,
                              .cycle_second_step_size = 2,
                              .decay_step_size = 2};
  // After the cycle of 6 steps: 1 / (1 + 0.5 n / 2).
  expect_table({{.kind = LrScheduleKind::kOneCycle, .one_cycle = cycle}, 7.0},
               {1, 2, 3, 4, 5, 3, 1, 1 / 1.25, 1 / 1.5, 1 / 1.75});
}

TEST(LrSchedule, OneCycleMovesTheMomentumTheOtherWay) {
  const OneCycleOptions cycle{.cycle_min_lr = 0,
                              .cycle_max_lr = 1,
                              .cycle_first_step_size = 2,
                              .decay_step_size = 4,
                              .cycle_min_mom = 0.25,
                              .cycle_max_mom = 0.75,
                              .decay_mom_rate = 0.25};
  const LrSchedule schedule({.kind = LrScheduleKind::kOneCycle, .one_cycle = cycle}, 7.0);
  const std::vector<double> expected = {0.75, 0.5, 0.25, 0.5, 0.75, 0.75 * 1.0625, 0.75 * 1.125};
  for (size_t applied = 0; applied < expected.size(); ++applied)
    EXPECT_DOUBLE_EQ(*schedule.momentum(static_cast<int64_t>(applied)), expected[applied]) << applied;
  EXPECT_DOUBLE_EQ(*schedule.momentum(1'000'000), 0.9999);  // a moment that forgets nothing is none
}

TEST(LrSchedule, OneCycleClimbsStairs) {
  const OneCycleOptions cycle{.cycle_min_lr = 0,
                              .cycle_max_lr = 1,
                              .cycle_first_step_size = 4,
                              .cycle_second_step_size = 3,
                              .cycle_first_stair_count = 2,
                              .cycle_second_stair_count = 1};
  expect_table({{.kind = LrScheduleKind::kOneCycle, .one_cycle = cycle}, 7.0}, {0, 0, 0.5, 0.5, 1, 0, 0, 0, 0});
}

TEST(LrSchedule, OneCycleWithoutASecondHalfEndsAtItsTop) {
  const OneCycleOptions cycle{
      .cycle_min_lr = 1, .cycle_max_lr = 5, .cycle_first_step_size = 4, .cycle_second_step_size = 0};
  expect_table({{.kind = LrScheduleKind::kOneCycle, .one_cycle = cycle}, 7.0}, {1, 2, 3, 4, 1, 1});
}

TEST(LrSchedule, OneCycleTakesValuesForEachGroup) {
  const OneCycleOptions cycle{.cycle_min_lr = std::vector<double>{1, 2},
                              .cycle_max_lr = std::vector<double>{3, 6},
                              .cycle_first_step_size = 2,
                              .cycle_min_mom = std::vector<double>{0.25, 0.5},
                              .cycle_max_mom = 0.75};
  const LrSchedule schedule({.kind = LrScheduleKind::kOneCycle, .one_cycle = cycle}, std::vector<double>{7.0, 7.0});
  EXPECT_DOUBLE_EQ(schedule.lr(1, 0), 2);
  EXPECT_DOUBLE_EQ(schedule.lr(1, 1), 4);
  EXPECT_DOUBLE_EQ(*schedule.momentum(2, 0), 0.25);
  EXPECT_DOUBLE_EQ(*schedule.momentum(2, 1), 0.5);
}

TEST(LrSchedule, OnlyOneCycleMovesTheMomentumAndOnlyIfItIsToldTo) {
  EXPECT_FALSE(LrSchedule({}, 1.0).momentum(3));
  EXPECT_FALSE(
      LrSchedule({.kind = LrScheduleKind::kOneCycle, .one_cycle = {.cycle_max_lr = 1, .cycle_momentum = false}}, 1.0)
          .momentum(3));
}

TEST(LrSchedule, LinearWarmsUpAndFallsToItsEnd) {
  expect_table({{.kind = LrScheduleKind::kLinear, .warmup_num_steps = 3, .total_num_steps = 7, .min_ratio = 0.5}, 4.0},
               {1, 2, 3, 4, 3.5, 3, 2.5, 2, 2});
}

TEST(LrSchedule, CosineFallsAlongHalfAWave) {
  const LrSchedule schedule(
      {.kind = LrScheduleKind::kCosine, .warmup_num_steps = 1, .total_num_steps = 5, .min_ratio = 0.5}, 4.0);
  const double root = std::sqrt(0.5);  // cos(pi / 4)
  const std::vector<double> expected = {2, 4, 2 + (1 + root), 3, 2 + (1 - root), 2, 2};
  for (size_t applied = 0; applied < expected.size(); ++applied)
    EXPECT_NEAR(schedule.lr(static_cast<int64_t>(applied)), expected[applied], 1e-15) << applied;
}

TEST(LrSchedule, WsdHoldsTheRateUntilItsLastSteps) {
  expect_table({{.kind = LrScheduleKind::kWsd, .warmup_num_steps = 1, .total_num_steps = 8, .decay_num_steps = 4}, 4.0},
               {2, 4, 4, 4, 4, 3, 2, 1, 0, 0});
}

TEST(LrSchedule, ScalesTheLearningRateOfEveryGroup) {
  const LrSchedule wave({.kind = LrScheduleKind::kLinear, .warmup_num_steps = 0, .total_num_steps = 4}, {4.0, 8.0});
  EXPECT_DOUBLE_EQ(wave.lr(1, 0), 3);
  EXPECT_DOUBLE_EQ(wave.lr(1, 1), 6);
  const LrSchedule warmup({.kind = LrScheduleKind::kWarmup,
                           .warmup_min_lr = std::vector<double>{0, 2},
                           .warmup_num_steps = 4,
                           .warmup_type = WarmupKind::kLinear},
                          {4.0, 6.0});
  EXPECT_DOUBLE_EQ(warmup.lr(3, 0), 2);  // i = 2 of 4
  EXPECT_DOUBLE_EQ(warmup.lr(3, 1), 4);
  const LrSchedule test({.kind = LrScheduleKind::kLrRangeTest, .lr_range_test = {.min_lr = std::vector<double>{1, 3}}},
                        {4.0, 6.0});
  EXPECT_DOUBLE_EQ(test.lr(0, 1), 3);
}

std::string refusal_of(const LrScheduleOptions& options, size_t groups = 1) {
  try {
    LrSchedule(options, std::vector<double>(groups, 1.0));
  } catch (const ConfigError& error) {
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return "";
}

TEST(LrSchedule, RefusesByNameAndValueWhatDoesNotFit) {
  const std::string prefix = "scheduler.params.";
  EXPECT_EQ(refusal_of({.kind = LrScheduleKind::kWarmupCosine}),
            prefix + "total_num_steps=0: WarmupCosineLR needs the number of steps of the whole training, 1 or more");
  EXPECT_EQ(refusal_of({.kind = LrScheduleKind::kWarmup, .warmup_num_steps = -3}),
            prefix + "warmup_num_steps=-3: WarmupLR needs 0 or more");
  EXPECT_EQ(refusal_of({.kind = LrScheduleKind::kLinear, .warmup_num_steps = 9, .total_num_steps = 8}),
            prefix + "total_num_steps=8: warm-up takes 9 steps; use fewer, or a larger total");
  EXPECT_EQ(
      refusal_of({.kind = LrScheduleKind::kWsd, .warmup_num_steps = 2, .total_num_steps = 8, .decay_num_steps = 7}),
      prefix + "total_num_steps=8: warm-up and decay take 9 steps; use fewer, or a larger total");
  EXPECT_EQ(refusal_of({.kind = LrScheduleKind::kWsd, .warmup_num_steps = 2, .total_num_steps = 8}),
            prefix + "decay_num_steps=0: wsd needs the number of its last, decaying steps, 1 or more");
  EXPECT_EQ(refusal_of({.kind = LrScheduleKind::kLrRangeTest, .lr_range_test = {.step_size = 0}}),
            prefix + "lr_range_test_step_size=0: use 1 or more steps");
  EXPECT_EQ(refusal_of({.kind = LrScheduleKind::kOneCycle, .one_cycle = {.cycle_min_lr = 2, .cycle_max_lr = 1}}),
            prefix + "cycle_max_lr=1: use cycle_min_lr=2 or more");
  EXPECT_EQ(refusal_of({.kind = LrScheduleKind::kOneCycle, .one_cycle = {.cycle_max_lr = 1, .cycle_max_mom = 1}}),
            prefix + "cycle_max_mom=1: use 0 <= momentum < 1");
  EXPECT_EQ(refusal_of({.kind = LrScheduleKind::kWarmup, .warmup_min_lr = std::vector<double>{1, 2}}, 3),
            prefix + "warmup_min_lr has 2 values for 3 parameter groups; give one number, or one per group");
}

}  // namespace
}  // namespace trireme
