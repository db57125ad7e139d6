#include "trireme/observe/progress.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

namespace trireme {
namespace {

using std::chrono::milliseconds;

/// A terminal (or none) and a clock that stand still until told otherwise.
struct FakeOutput {
  std::string text;
  int writes = 0;
  std::optional<int> columns;
  std::chrono::steady_clock::time_point now{};

  ProgressOutput output() {
    return {.write = [this](std::string_view piece) { text += piece, ++writes; },
            .columns = [this] { return columns; },
            .now = [this] { return now; }};
  }
  /// The text of the terminal's last line.
  std::string shown() const {
    const auto begin = text.find_last_of("\r");
    return text.substr(begin + 1, text.find("\x1b[K", begin) - begin - 1);
  }
};

TEST(Progress, PlainLinesComeEverySoManyStepsWithoutControlCharacters) {
  FakeOutput log;
  {
    Progress progress({.total_steps = 25, .plain_every_steps = 10}, log.output());
    for (int64_t step = 1; step <= 25; ++step) progress.update({step, 2.0, 1e-3, 100});
  }
  EXPECT_EQ(std::count(log.text.begin(), log.text.end(), '\n'), 3);  // 10, 20, 25
  EXPECT_TRUE(
      std::all_of(log.text.begin(), log.text.end(), [](char c) { return c == '\n' || (c >= ' ' && c < 0x7f); }));
}

TEST(Progress, SaysStepLossRateSpeedAndWhatIsLeft) {
  FakeOutput log;
  Progress progress({.total_steps = 100, .plain_every_steps = 10}, log.output());
  for (int64_t step = 1; step <= 10; ++step) {
    log.now += milliseconds(500);
    progress.update({step, 2.0, 1e-3, 1000});
  }
  // 10 steps in 5 s: 10,000 tokens in 5 s, 90 steps of 0.5 s are left.
  EXPECT_EQ(log.text, "step 10/100  loss 2.0000  lr 1.00e-03  2.00k tokens/s  left 0:45\n");
}

TEST(Progress, SaysTheWorkOfARankAndItsPartOfThePeakWhereTheyAreKnown) {
  const auto line = [](const ComputeRate& compute) {
    FakeOutput log;
    Progress progress({.total_steps = 100, .plain_every_steps = 1, .compute = compute}, log.output());
    log.now += milliseconds(500);
    progress.update({1, 2.0, 1e-3, 1000});
    return log.text;
  };
  // 2000 tokens/s of 8e9 operations are 16 TFLOP/s, 4 for each of 4 ranks.
  EXPECT_EQ(line({.flops_per_token = 8e9, .ranks = 4, .peak_tflops = 10}),
            "step 1/100  loss 2.0000  lr 1.00e-03  2.00k tokens/s  4.00 TFLOP/s/rank  40 % MFU  left 0:50\n");
  EXPECT_EQ(line({.flops_per_token = 8e9}),
            "step 1/100  loss 2.0000  lr 1.00e-03  2.00k tokens/s  16.0 TFLOP/s  left 0:50\n");
}

TEST(Progress, OnATerminalTheWorkIsShownWhereThereIsRoomForAllTheRest) {
  const auto shown = [](int columns) {
    FakeOutput terminal;
    terminal.columns = columns;
    Progress progress({.total_steps = 100, .compute = {.flops_per_token = 8e9, .peak_tflops = 100}}, terminal.output());
    terminal.now += milliseconds(500);
    progress.update({1, 2.0, 1e-3, 1000});
    return terminal.shown();
  };
  const std::string before = "step 1/100  loss 2.0000  lr 1.00e-03  2.00k tokens/s", after = "  left 0:50";
  // The lines have 87, 77, 73 and 63 columns, and the last one of a terminal stays free.
  EXPECT_EQ(shown(88), before + "  16.0 TFLOP/s  16 % MFU" + after);
  EXPECT_EQ(shown(87), before + "  16.0 TFLOP/s" + after);
  EXPECT_EQ(shown(78), before + "  16.0 TFLOP/s" + after);
  EXPECT_EQ(shown(77), before + "  16 % MFU" + after);
  EXPECT_EQ(shown(73), before + after);
  EXPECT_TRUE(shown(120).starts_with("step 1/100 [")) << shown(120);
}

TEST(Progress, SmoothsTheLossWithoutABiasToZero) {
  FakeOutput log;
  Progress progress({.total_steps = 2, .plain_every_steps = 1}, log.output());
  progress.update({1, 4.0, 0, 1});
  progress.update({2, 2.0, 0, 1});
  EXPECT_NE(log.text.find("loss 4.0000"), std::string::npos);
  // (0.95 * 4 + 2) / 1.95
  EXPECT_NE(log.text.find("loss 2.9744"), std::string::npos) << log.text;
}

TEST(Progress, ALossThatIsNotFiniteIsShownAndForgotten) {
  FakeOutput log;
  Progress progress({.total_steps = 3, .plain_every_steps = 1}, log.output());
  progress.update({1, 2.0, 0, 1});
  progress.update({2, std::nan(""), 0, 1});
  progress.update({3, 2.0, 0, 1});
  EXPECT_NE(log.text.find("step 2/3  loss nan"), std::string::npos) << log.text;
  EXPECT_NE(log.text.find("step 3/3  loss 2.0000"), std::string::npos) << log.text;
}

TEST(Progress, ATerminalIsRedrawnAtMostTenTimesPerSecond) {
  FakeOutput terminal;
  terminal.columns = 80;
  Progress progress({.total_steps = 100'000}, terminal.output());
  for (int64_t step = 1; step <= 1000; ++step) {
    terminal.now += milliseconds(1);
    progress.update({step, 2.0, 1e-3, 1});
  }
  EXPECT_LE(terminal.writes, 11);
  EXPECT_GE(terminal.writes, 9);
}

TEST(Progress, ALineNeverWraps) {
  for (const int columns : {1, 10, 40, 80, 100, 300}) {
    FakeOutput terminal;
    terminal.columns = columns;
    Progress progress({.total_steps = 100'000, .compute = {.flops_per_token = 8e9, .ranks = 2, .peak_tflops = 989.4}},
                      terminal.output());
    terminal.now += milliseconds(1);
    progress.update({99'999, 2.0, 1e-3, 1'000'000});
    EXPECT_LT(terminal.shown().size(), static_cast<size_t>(columns)) << terminal.shown();
    EXPECT_EQ(terminal.text.find('\n'), std::string::npos);
  }
}

TEST(Progress, TheBarShowsTheFractionDone) {
  FakeOutput terminal;
  terminal.columns = 200;
  Progress progress({.total_steps = 4}, terminal.output());
  terminal.now += milliseconds(1);
  progress.update({2, 2.0, 1e-3, 1});
  EXPECT_NE(terminal.shown().find("[" + std::string(15, '=') + ">" + std::string(14, ' ') + "]"), std::string::npos)
      << terminal.shown();
}

TEST(Progress, AnInterruptedBarEndsItsLine) {
  FakeOutput terminal;
  terminal.columns = 80;
  {
    Progress progress({.total_steps = 10}, terminal.output());
    terminal.now += milliseconds(1);
    progress.update({1, 2.0, 1e-3, 1});
    progress.finish();
  }
  EXPECT_EQ(std::count(terminal.text.begin(), terminal.text.end(), '\n'), 1);
  EXPECT_EQ(terminal.text.back(), '\n');
}

TEST(Progress, AnInterruptedLogGetsItsLastStep) {
  FakeOutput log;
  Progress progress({.total_steps = 100, .plain_every_steps = 10}, log.output());
  for (int64_t step = 1; step <= 13; ++step) progress.update({step, 2.0, 1e-3, 1});
  progress.finish();
  progress.finish();
  EXPECT_NE(log.text.find("step 13/100"), std::string::npos);
  EXPECT_EQ(std::count(log.text.begin(), log.text.end(), '\n'), 2);
}

TEST(Progress, ANoteStandsAboveTheBar) {
  FakeOutput terminal;
  terminal.columns = 80;
  Progress progress({.total_steps = 10}, terminal.output());
  terminal.now += milliseconds(1);
  progress.update({1, 2.0, 1e-3, 1});
  progress.note("validation loss 1.5");
  const auto note = terminal.text.find("\r\x1b[Kvalidation loss 1.5\n");
  ASSERT_NE(note, std::string::npos);
  EXPECT_NE(terminal.text.find("step 1/10", note), std::string::npos) << "the bar is drawn again below";
}

TEST(Progress, WithoutStepsNothingIsWritten) {
  FakeOutput log, terminal;
  terminal.columns = 80;
  { Progress progress({.total_steps = 0}, log.output()); }
  { Progress progress({.total_steps = 0}, terminal.output()); }
  EXPECT_EQ(log.text + terminal.text, "");
}

TEST(Progress, AResumedRunCountsItsRateFromTheResumedStep) {
  FakeOutput log;
  Progress progress({.total_steps = 100, .first_step = 90, .plain_every_steps = 1}, log.output());
  log.now += milliseconds(2000);
  progress.update({91, 2.0, 1e-3, 10});
  EXPECT_NE(log.text.find("5 tokens/s  left 0:18"), std::string::npos) << log.text;
}

TEST(ShortText, CountsAndDurationsAreRoundedToWhatOneReads) {
  EXPECT_EQ(short_count(0), "0");
  EXPECT_EQ(short_count(7), "7");
  EXPECT_EQ(short_count(999.7), "1.00k");
  EXPECT_EQ(short_count(12345), "12.3k");
  EXPECT_EQ(short_count(7.5e9), "7.50G");
  EXPECT_EQ(short_quantity(158e9, "FLOP/s"), "158 GFLOP/s");
  EXPECT_EQ(short_quantity(7, "B"), "7 B");
  EXPECT_EQ(short_quantity(std::nan(""), "B"), "nan B");
  EXPECT_EQ(short_duration(65), "1:05");
  EXPECT_EQ(short_duration(3725), "1:02:05");
  EXPECT_EQ(short_duration(-1), "--");
  EXPECT_EQ(short_duration(std::nan("")), "--");
}

}  // namespace
}  // namespace trireme
