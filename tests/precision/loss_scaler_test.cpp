// The loss scale over thousands of steps, against an independent account of the same rules.
#include "trireme/precision/loss_scaler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "trireme/base/error.h"

namespace trireme {
namespace {

constexpr int kSteps = 3200;

using Overflows = std::vector<bool>;

Overflows overflows_where(const std::function<bool(int)>& is_overflow) {
  Overflows pattern;
  for (int step = 0; step < kSteps; ++step) pattern.push_back(is_overflow(step));
  return pattern;
}

Overflows random_overflows(unsigned one_in) {
  std::mt19937 random(one_in);
  return overflows_where([&](int) { return random() % one_in == 0; });
}

const std::map<std::string, Overflows>& patterns() {
  static const std::map<std::string, Overflows> all = {
      {"never", overflows_where([](int) { return false; })},
      {"at the start", overflows_where([](int step) { return step < 5; })},
      {"in pairs", overflows_where([](int step) { return step % 90 < 2; })},
      {"every other", overflows_where([](int step) { return step < 40 && step % 2 == 0; })},
      {"before every doubling", overflows_where([](int step) { return step % 51 == 50; })},
      {"after every doubling", overflows_where([](int step) { return step % 53 == 52; })},
      {"in 40", random_overflows(40)},
      {"in 200", random_overflows(200)},
  };
  return all;
}

/// The rules as their source tells them, from the whole history instead of a running state: the scale is the first one
/// times 2 to the number of doublings less the number of halvings, clamped on the way.
struct Account {
  std::vector<double> scales;  ///< before each step, and after the last
  int failed_at = -1;          ///< the step whose overflow cannot lower the scale
};

Account account_of(const Overflows& overflows, const LossScaleOptions& options, LossScaleRule rule) {
  Account account;
  double scale = std::pow(2.0, static_cast<double>(options.initial_scale_power));
  int64_t quiet = 0;  // steps without overflow since the last one, or the start
  int64_t used = 0;   // overflows that hysteresis has let pass since it was full
  for (int step = 0; step < static_cast<int>(overflows.size()); ++step) {
    account.scales.push_back(scale);
    if (overflows[step]) {
      quiet = 0;
      const bool passes = rule != LossScaleRule::kClamp && used < options.hysteresis - 1;
      if (passes) {
        ++used;
        continue;
      }
      if (scale == options.min_loss_scale && rule == LossScaleRule::kHysteresis) {
        account.failed_at = step;
        return account;
      }
      scale = scale / 2 < options.min_loss_scale ? options.min_loss_scale : scale / 2;
      continue;
    }
    // A doubling comes with the (window + 1)th quiet step, under smp's rule with the window-th, then with every
    // window-th. The start counts like an overflow.
    ++quiet;
    if (options.consecutive_hysteresis) used = 0;
    const int64_t waited = rule == LossScaleRule::kHysteresisAndClamp ? quiet : quiet - 1;
    if (waited > 0 && waited % options.loss_scale_window == 0) {
      scale *= 2;
      used = 0;
    }
  }
  account.scales.push_back(scale);
  return account;
}

std::string text_of(const LossScaleOptions& options, LossScaleRule rule) {
  return str("power ", options.initial_scale_power, ", window ", options.loss_scale_window, ", hysteresis ",
             options.hysteresis, options.consecutive_hysteresis ? " consecutive" : "", ", min ", options.min_loss_scale,
             rule == LossScaleRule::kHysteresis ? "" : ", clamp",
             rule == LossScaleRule::kHysteresisAndClamp ? " with hysteresis" : "");
}

TEST(LossScaler, FollowsTheRulesForThousandsOfStepsWhateverTheOptions) {
  for (const auto& [name, overflows] : patterns())
    for (const LossScaleRule rule :
         {LossScaleRule::kHysteresis, LossScaleRule::kClamp, LossScaleRule::kHysteresisAndClamp})
      for (const int64_t window : {1, 50, 52, 1000})
        for (const int64_t hysteresis : {1, 2, 4})
          for (const bool consecutive : {false, true})
            for (const double minimum : {1.0, 0.25, 3.0}) {
              const LossScaleOptions options = {.initial_scale_power = 16,
                                                .loss_scale_window = window,
                                                .hysteresis = hysteresis,
                                                .consecutive_hysteresis = consecutive,
                                                .min_loss_scale = minimum};
              const Account expected = account_of(overflows, options, rule);
              LossScaler scaler(options, rule);
              for (size_t step = 0; step < expected.scales.size(); ++step) {
                ASSERT_EQ(scaler.scale(), expected.scales[step])
                    << "overflows " << name << ", " << text_of(options, rule) << ", step " << step;
                if (step == overflows.size()) break;
                if (static_cast<int>(step) == expected.failed_at) {
                  EXPECT_THROW(scaler.update(true), StateError) << name << ", " << text_of(options, rule);
                  break;
                }
                scaler.update(overflows[step]);
              }
            }
}

/// The scale after each of some numbers of updates, written down by hand.
using Checkpoints = std::vector<std::pair<int, double>>;

void expect_checkpoints(LossScaler scaler, const std::function<bool(int)>& is_overflow,
                        const Checkpoints& checkpoints) {
  int step = 0;
  for (const auto& [updates, scale] : checkpoints) {
    for (; step < updates; ++step) scaler.update(is_overflow(step));
    EXPECT_EQ(scaler.scale(), scale) << "after " << updates << " updates";
  }
}

TEST(LossScaler, DoublesWithTheStepAfterAWindowAndThenWithEveryWindow) {
  const auto never = [](int) { return false; };
  expect_checkpoints(LossScaler({}, LossScaleRule::kHysteresis), never,
                     {{1, 65536}, {1000, 65536}, {1001, 131072}, {2000, 131072}, {2001, 262144}, {3001, 524288}});
  expect_checkpoints(LossScaler({}, LossScaleRule::kClamp), never, {{1000, 65536}, {1001, 131072}, {3001, 524288}});
}

TEST(LossScaler, LetsTheFirstOverflowPassUntilTheScaleHasDoubled) {
  // Overflows at steps 0, 1, 2, then quiet: with a window of 2 the third quiet step doubles and refills.
  const auto is_overflow = [](int step) { return step < 3 || step == 6 || step == 7; };
  const LossScaleOptions options = {.initial_scale_power = 4, .loss_scale_window = 2};
  expect_checkpoints(LossScaler(options, LossScaleRule::kHysteresis), is_overflow,
                     {{1, 16}, {2, 8}, {3, 4}, {5, 4}, {6, 8}, {7, 8}, {8, 4}});
  expect_checkpoints(LossScaler(options, LossScaleRule::kClamp), is_overflow,
                     {{1, 8}, {2, 4}, {3, 2}, {5, 2}, {6, 4}, {7, 2}, {8, 1}});
}

TEST(LossScaler, RefillsHysteresisWithEveryQuietStepWhereItIsConsecutive) {
  const auto every_other = [](int step) { return step % 2 == 0; };
  expect_checkpoints(LossScaler({.consecutive_hysteresis = true}, LossScaleRule::kHysteresis), every_other,
                     {{100, 65536}, {3000, 65536}});
  expect_checkpoints(LossScaler({}, LossScaleRule::kHysteresis), every_other,
                     {{1, 65536}, {3, 32768}, {31, 2}, {33, 1}});
}

TEST(LossScaler, AtTheMinimumFailsUnderZeroAndStaysAtStageZero) {
  const LossScaleOptions options = {.initial_scale_power = 1, .hysteresis = 1};
  LossScaler zero(options, LossScaleRule::kHysteresis);
  zero.update(true);
  const LossScaler::State before = zero.state();
  try {
    zero.update(true);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const StateError& error) {
    EXPECT_EQ(std::string(error.what())
                  .find("Current loss scale already at minimum - cannot decrease scale anymore. "
                        "Exiting run."),
              0u)
        << error.what();
  }
  EXPECT_EQ(zero.state(), before);
  LossScaler clamped(options, LossScaleRule::kClamp);
  for (int i = 0; i < 5; ++i) clamped.update(true);
  EXPECT_EQ(clamped.scale(), 1);
}

TEST(LossScaler, OfAFixedScaleNeverChanges) {
  LossScaler scaler({.loss_scale = 128}, LossScaleRule::kHysteresis);
  EXPECT_FALSE(scaler.is_dynamic());
  for (int i = 0; i < 3000; ++i) scaler.update(i % 3 == 0);
  EXPECT_EQ(scaler.scale(), 128);
}

TEST(LossScaler, ContinuesFromItsState) {
  const Overflows& overflows = patterns().at("in 40");
  const LossScaleOptions options = {.loss_scale_window = 20};
  LossScaler whole(options, LossScaleRule::kClamp);
  for (int i = 0; i < 100; ++i) whole.update(overflows[i]);
  LossScaler resumed(options, LossScaleRule::kClamp);
  resumed.set_state(whole.state());
  for (int i = 100; i < kSteps; ++i) {
    whole.update(overflows[i]);
    resumed.update(overflows[i]);
    ASSERT_EQ(resumed.state(), whole.state());
  }
  for (const LossScaler::State& wrong :
       {LossScaler::State{.scale = 0}, LossScaler::State{.scale = std::nan("")}, LossScaler::State{.steps = -1},
        LossScaler::State{.steps = 3, .last_overflow = 3}, LossScaler::State{.hysteresis = 0}})
    EXPECT_THROW(resumed.set_state(wrong), CheckpointError);
}

std::string refusal_of(const LossScaleOptions& options) {
  try {
    check_loss_scale(options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(LossScaler, RefusesByNameWhatIsOutOfRange) {
  EXPECT_EQ(refusal_of({}), "");
  EXPECT_EQ(refusal_of({.loss_scale = 128, .loss_scale_window = 0}), "");
  EXPECT_EQ(refusal_of({.loss_scale = -1}), "fp16.loss_scale=-1: use 0 (dynamic) or a number above");
  EXPECT_EQ(refusal_of({.loss_scale = std::numeric_limits<double>::infinity()}),
            "fp16.loss_scale=inf: use 0 (dynamic) or a number above");
  EXPECT_EQ(refusal_of({.initial_scale_power = 127}), "fp16.initial_scale_power=127: use 0 to 126");
  EXPECT_EQ(refusal_of({.loss_scale_window = 0}), "fp16.loss_scale_window=0: use 1 or more steps");
  EXPECT_EQ(refusal_of({.hysteresis = 0}), "fp16.hysteresis=0: use 1 or more overflows");
  EXPECT_EQ(refusal_of({.min_loss_scale = 0}), "fp16.min_loss_scale=0: use a number above 0");
  EXPECT_EQ(refusal_of({.initial_scale_power = 1, .min_loss_scale = 4}),
            "fp16.min_loss_scale=4: it is above the initial scale, 2^initial_scale_power; lower it");
}

}  // namespace
}  // namespace trireme
