// Closed forms of DeepSpeed's schedules, i = max(applied_steps - 1, 0).
#include "trireme/optim/schedule.h"

#include <gtest/gtest.h>

#include <cmath>
#include <numbers>

#include "trireme/base/error.h"

namespace trireme {
namespace {

TEST(Schedule, ConstantIsTheOptimizersLearningRate) {
  const Schedule schedule({}, 0.25);
  EXPECT_EQ(schedule.lr(0), 0.25);
  EXPECT_EQ(schedule.lr(1'000'000), 0.25);
}

TEST(Schedule, WarmupLrRisesWithTheLogarithmOfTheStepThenStays) {
  const Schedule schedule(
      {.kind = ScheduleKind::kWarmup, .warmup_min_lr = 0.1, .warmup_max_lr = 1.1, .warmup_num_steps = 100}, 7.0);
  EXPECT_DOUBLE_EQ(schedule.lr(0), 0.1);
  EXPECT_DOUBLE_EQ(schedule.lr(1), 0.1);
  EXPECT_DOUBLE_EQ(schedule.lr(10), 0.1 + std::log(10.0) / std::log(100.0));  // i + 1 = 10: half of the way
  EXPECT_DOUBLE_EQ(schedule.lr(10), 0.6);
  EXPECT_DOUBLE_EQ(schedule.lr(101), 1.1);
  EXPECT_DOUBLE_EQ(schedule.lr(5000), 1.1);
}

TEST(Schedule, WarmupLrWithoutAMaximumEndsAtTheOptimizersLearningRate) {
  const Schedule schedule({.kind = ScheduleKind::kWarmup, .warmup_num_steps = 10, .warmup_type = WarmupKind::kLinear},
                          0.5);
  EXPECT_DOUBLE_EQ(schedule.lr(6), 0.25);
  EXPECT_DOUBLE_EQ(schedule.lr(11), 0.5);
}

TEST(Schedule, WarmupOfZeroStepsLastsTwo) {
  const Schedule schedule({.kind = ScheduleKind::kWarmup, .warmup_num_steps = 0}, 1.0);
  EXPECT_DOUBLE_EQ(schedule.lr(0), 0);
  EXPECT_DOUBLE_EQ(schedule.lr(2), 1.0);  // ln 2 / ln 2
}

TEST(Schedule, WarmupDecayLrFallsLinearlyToTheMinimumAtTheLastStep) {
  const Schedule schedule({.kind = ScheduleKind::kWarmupDecay,
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

TEST(Schedule, WarmupCosineLrFollowsHalfAWaveAndStaysAtItsEnd) {
  const Schedule schedule({.kind = ScheduleKind::kWarmupCosine,
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

TEST(Schedule, ACosineWithoutATotalIsRefusedByName) {
  try {
    Schedule({.kind = ScheduleKind::kWarmupCosine}, 1.0);
    FAIL() << "total_num_steps is missing";
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("scheduler.params.total_num_steps=0"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace trireme
