#include "trireme/observe/step_timers.h"

#include <gtest/gtest.h>

#include <thread>
#include <vector>

namespace trireme {
namespace {

using std::chrono::milliseconds;

Notice took(Notice::Kind kind, std::string_view name, int ms, std::string_view caller = {}) {
  return {
      .kind = kind, .name = name, .caller = caller, .begin = {}, .end = Notice::Clock::time_point(milliseconds(ms))};
}

TEST(StepTimers, AddUpTheMicroBatchesOfAWindow) {
  std::vector<StepTimes> ended;
  StepTimers timers([&](const StepTimes& times) { ended.push_back(times); });
  using Kind = Notice::Kind;
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    timers.hear(took(Kind::kCall, "forward", 10));
    timers.hear(took(Kind::kWait, "reduce_scatter", 4, "backward"));
    timers.hear(took(Kind::kWait, "all_gather", 3, "backward"));  // of weights: no reduction
    timers.hear(took(Kind::kCall, "backward", 20));
  }
  EXPECT_FALSE(timers.last());
  timers.hear({.kind = Kind::kWindow, .number = 7});
  EXPECT_TRUE(ended.empty());  // step() has not returned yet
  timers.hear(took(Kind::kCall, "step", 5));
  ASSERT_EQ(ended.size(), 1);
  EXPECT_EQ(ended[0].step, 7);
  EXPECT_DOUBLE_EQ(ended[0].forward_ms, 20);
  EXPECT_DOUBLE_EQ(ended[0].backward_ms, 40);
  EXPECT_DOUBLE_EQ(ended[0].backward_reduce_ms, 8);
  EXPECT_DOUBLE_EQ(ended[0].backward_inner_ms(), 32);
  EXPECT_DOUBLE_EQ(ended[0].step_ms, 5);
  EXPECT_EQ(to_text(ended[0]),
            "time (ms) | fwd: 20.00 | bwd: 40.00 | bwd_inner: 32.00 | bwd_allreduce: 8.00 | step: 5.00");

  timers.hear(took(Kind::kCall, "forward", 1));
  timers.hear({.kind = Kind::kWindow, .number = 8});
  timers.hear(took(Kind::kCall, "step", 2));
  EXPECT_DOUBLE_EQ(timers.last()->forward_ms, 1);  // nothing of the window before
}

TEST(StepTimers, CountTheMethodsOfTheModelThatTheyFollow) {
  const int own = 0, other = 0;
  StepTimers timers(nullptr);
  timers.follow(&own);
  using Kind = Notice::Kind;
  const auto call = [&](std::string_view name, int ms, const int* of) {
    Notice notice = took(Kind::kCall, name, ms);
    notice.of = of;
    timers.hear(notice);
  };
  call("forward", 1, &own);
  call("forward", 100, &other);
  timers.hear(took(Kind::kWait, "reduce_scatter", 50, "backward"));
  call("backward", 200, &other);
  timers.hear(took(Kind::kWait, "reduce_scatter", 2, "backward"));
  call("backward", 3, &own);
  timers.hear({.kind = Kind::kWindow, .number = 9});
  call("step", 300, &other);
  EXPECT_FALSE(timers.last());
  timers.hear({.kind = Kind::kWindow, .number = 4});
  call("step", 5, &own);
  ASSERT_TRUE(timers.last());
  EXPECT_EQ(timers.last()->step, 4);
  EXPECT_DOUBLE_EQ(timers.last()->forward_ms, 1);
  EXPECT_DOUBLE_EQ(timers.last()->backward_ms, 3);
  EXPECT_DOUBLE_EQ(timers.last()->backward_reduce_ms, 2);
  EXPECT_DOUBLE_EQ(timers.last()->step_ms, 5);
}

TEST(StepTimers, DoNotHearOtherThreads) {
  StepTimers timers(nullptr);
  std::thread([&] { timers.hear(took(Notice::Kind::kCall, "forward", 1000)); }).join();
  timers.hear({.kind = Notice::Kind::kWindow, .number = 1});
  timers.hear(took(Notice::Kind::kCall, "step", 2));
  EXPECT_DOUBLE_EQ(timers.last()->forward_ms, 0);
}

}  // namespace
}  // namespace trireme
