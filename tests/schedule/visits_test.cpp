// Schedules of programs that come back to stages.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/schedule/check.h"
#include "trireme/schedule/schedule.h"
#include "trireme/schedule/simulate.h"

namespace trireme::pipeline {
namespace {

constexpr PartTimes kTwice{.forward = 1, .backward_input = 1, .backward_weight = 1};

/// How many times as fast as one stage.
double speed_up(const std::vector<int>& visits, const VisitsOptions& options) {
  PartTimes times = kTwice;
  times.of_part = options.times;
  double work = 0;
  for (size_t visit = 0; visit < visits.size(); ++visit) work += 3 * (options.times.empty() ? 1 : options.times[visit]);
  return options.micro_batches * work / simulate(visits_schedule(visits, options), times).makespan;
}

TEST(Visits, AProgramThatComesBackKeepsItsStagesBusy) {
  const std::vector<double> tied{1, 2, 1};  // as much work on either stage
  EXPECT_NEAR(speed_up({0, 1, 0}, {.micro_batches = 8, .active = 4, .times = tied}), 96.0 / 52, 1e-9);
  EXPECT_NEAR(speed_up({0, 1, 0}, {.micro_batches = 8, .active = 1, .times = tied}), 1.0, 1e-9);
  EXPECT_GT(speed_up({0, 1, 0}, {.micro_batches = 32, .active = 4, .times = tied}), 1.93);
  EXPECT_GT(speed_up({0, 1, 2, 1, 0}, {.micro_batches = 8, .active = 5}), 2.0);
}

TEST(Visits, ALineOfStagesIsAsFastAs1F1BAndGPipe) {
  for (int p = 1; p <= 4; ++p) {
    std::vector<int> line;
    for (int stage = 0; stage < p; ++stage) line.push_back(stage);
    const double limit = simulate(one_f_one_b(p, 8), kTwice).makespan;
    EXPECT_NEAR(simulate(visits_schedule(line, {.micro_batches = 8, .active = p}), kTwice).makespan, limit, 1e-9) << p;
    EXPECT_NEAR(
        simulate(visits_schedule(line, {.micro_batches = 8, .active = 8, .forwards_first = true}), kTwice).makespan,
        limit, 1e-9)
        << p;
  }
}

/// Gradients are added up in the order of micro-batches, and no stage keeps more of them than it may.
TEST(Visits, PartsHaveMicroBatchesInOrderAndStagesNoMoreThanTheyMay) {
  for (const auto& visits : {std::vector<int>{0, 1, 0}, {1, 0}, {0, 1, 2, 1, 0}, {2, 0, 1, 2, 0, 1, 2}, {0, 0, 1}})
    for (int active = 1; active <= 4; ++active)
      for (const bool forwards_first : {false, true}) {
        const int limit = forwards_first ? 6 : active;
        const Schedule schedule =
            visits_schedule(visits, {.micro_batches = 6, .active = limit, .forwards_first = forwards_first});
        check(schedule);
        const std::vector<int> peaks = simulate(schedule, kTwice).peak_activations;
        for (int stage = 0; stage < schedule.stages; ++stage) {
          std::vector<int> next(2 * visits.size());
          for (const Step& step : schedule.streams[stage])
            for (const Instruction& one : step) {
              if (one.kind != Kind::kForward && one.kind != Kind::kBackward) continue;
              const int part = schedule.part_of(stage, one.chunk);
              EXPECT_EQ(schedule.stage_of(part), stage);
              EXPECT_EQ(schedule.chunk_of(part), one.chunk);
              EXPECT_EQ(one.micro_batch, next[2 * part + (one.kind == Kind::kForward ? 0 : 1)]++);
            }
          EXPECT_LE(peaks[stage], limit * schedule.chunks_of(stage));
        }
      }
}

TEST(Visits, ForwardsAlone) {
  const Schedule schedule = visits_schedule({0, 1, 0}, {.micro_batches = 3, .has_backward = false});
  check(schedule);
  EXPECT_EQ(simulate(schedule).makespan, 7);  // one gap on stage 0, before the last micro-batch comes back
}

TEST(Visits, WhatThereIsNotIsNamed) {
  const auto problem = [](const std::vector<int>& visits, const VisitsOptions& options) -> std::string {
    try {
      (void)visits_schedule(visits, options);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(problem({0, 2}, {}).find("no visit to stage 1 of 3"), std::string::npos);
  EXPECT_NE(problem({}, {}).find("visits=0"), std::string::npos);
  EXPECT_NE(problem({0}, {.active = 0}).find("active=0"), std::string::npos);
  EXPECT_NE(problem({0}, {.times = {1, 1}}).find("2 times of 1 visits"), std::string::npos);
}

}  // namespace
}  // namespace trireme::pipeline
