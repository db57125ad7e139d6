#include "trireme/observe/report.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "observe/curves.h"
#include "tests/observe/fixture.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using observe_test::Folder;
using observe_test::step_metrics;
using observe_test::text_of;

bool holds(const std::string& page, const std::string& text) { return page.find(text) != std::string::npos; }

RunLog small_log() {
  RunLog log;
  log.run = RunInfo{.model = "llama-3m",
                    .parameters = 3'145'728,
                    .ranks = 2,
                    .zero_stage = 3,
                    .dtype = "bf16",
                    .total_steps = 4,
                    .first_step = 0,
                    .config = R"({"zero_optimization":{"stage":3}})",
                    .data = "40 files"};
  for (int64_t step = 1; step <= 4; ++step) log.steps.push_back(step_metrics(step));
  log.validations = {{2, 3.0}, {4, 1.8125}};
  log.samples = {{4, "def ", "main():"}};
  log.end = RunEnd{.step = 4, .reason = "finished", .seconds = 65, .peak_memory_bytes_of_rank = {64 << 20, 96 << 20}};
  log.seconds = 65;
  return log;
}

TEST(Report, HoldsTheNumbersOfTheRun) {
  const std::string page = render_report(small_log());
  for (const char* text : {"llama-3m", "3,145,728", "ZeRO stage 3", "bf16", "1.8125", "1:05", "64 MiB, 96 MiB", "3,200",
                           "40 files", "&quot;stage&quot;: 3", "main():"})
    EXPECT_TRUE(holds(page, text)) << text;
  EXPECT_TRUE(holds(page, R"("loss":[10.0,5.0,3.3333333333333335,2.5])"));
}

TEST(Report, SaysWhatARankComputedOfItsPeak) {
  RunLog log = small_log();
  EXPECT_FALSE(holds(render_report(log), "Compute per rank"));
  log.run->flops_per_token = 16'000'000;
  log.run->peak_tflops = 989.4;
  log.end->peak_resident_bytes_of_rank = {70 << 20, 100 << 20};
  for (auto& step : log.steps) step.tflops_per_rank = 0.1 * static_cast<double>(step.step);
  log.steps[0].tflops_per_rank = 50;  // one that is off does not count
  for (auto& step : log.steps) step.mfu = *step.tflops_per_rank;
  const std::string page = render_report(log);
  for (const char* text : {"<b>400 GFLOP/s</b>", "median step, 40.0 % of the peak (MFU)", "16.0 MFLOP per token",
                           "989 TFLOP/s", "70 MiB, 100 MiB"})
    EXPECT_TRUE(holds(page, text)) << text;
}

TEST(Report, SaysWhatADiskDidAndWhetherItBoundsTheRun) {
  RunLog log = small_log();
  EXPECT_FALSE(holds(render_report(log), "Weights and states on disk"));
  for (StepMetrics& step : log.steps) {
    step.step_ms = 100;
    step.disk = {.bytes = 3'000'000, .read_bytes = 2'000'000, .written_bytes = 1'000'000, .wait_ms = 80};
  }
  log.steps.back().disk.reset();  // which a part of the run without a disk has added
  const std::string text = "3.0 MB on rank 0; a step reads 2.0 MB and writes 1.0 MB, and waits for that ";
  EXPECT_TRUE(holds(render_report(log), text + "80 % of its time: the disk bounds this run<"));
  for (StepMetrics& step : log.steps)
    if (step.disk) step.disk->wait_ms = 20;
  EXPECT_TRUE(holds(render_report(log), text + "20 % of its time<"));
}

TEST(Report, DrawsMemoryBetweenTheStepsThatMeasuredIt) {
  RunLog log = small_log();
  for (auto& step : log.steps) step.memory = {};
  log.steps[1].memory.pss_bytes = 4 << 20;
  log.steps[3].memory.pss_bytes = 6 << 20;
  EXPECT_TRUE(holds(render_report(log), R"("memory":[[2,4.0],[4,6.0]])"));
}

TEST(Report, SaysWhenWhereAndHowTheRunWasStarted) {
  RunLog log = small_log();
  EXPECT_FALSE(holds(render_report(log), ">Started<"));  // of a log of an older version
  log.started = "2026-11-01 10:00:00 UTC";
  log.run->started = "2026-11-02 11:00:00 UTC";
  log.run->host = "node7";
  log.run->command = "trireme train --data 'a <b>'";
  log.run->versions = "Trireme 0.1.0, torch 2.11.0";
  const std::string page = render_report(log);
  for (const char* text : {"<p>2026-11-01 10:00:00 UTC · on node7</p>", "Started</th><td>2026-11-01 10:00:00 UTC<",
                           "Resumed</th><td>2026-11-02 11:00:00 UTC<", "trireme train --data &#39;a &lt;b&gt;&#39;",
                           "Trireme 0.1.0, torch 2.11.0"})
    EXPECT_TRUE(holds(page, text)) << text;
}

TEST(Report, NeedsNothingFromElsewhere) {
  const std::string page = render_report(small_log());
  for (const char* text : {"https:", "src=", "href=", "@import", "url("}) EXPECT_FALSE(holds(page, text)) << text;
}

TEST(Report, EscapesEverythingThatComesFromTheRun) {
  RunLog log = small_log();
  const std::string attack = "</script><script>alert(1)</script><!--\"'&";
  log.run->model = attack;
  log.run->data = attack;
  log.run->config = R"({"</pre><script>alert(1)</script>":1})";
  log.samples = {{4, attack, attack}};
  log.checkpoints = {{.step = 4, .tag = attack, .bytes = 1, .seconds = 1}};
  log.end->reason = attack;
  const std::string page = render_report(log);
  EXPECT_FALSE(holds(page, "<script>alert"));
  EXPECT_FALSE(holds(page, "<!--"));
  EXPECT_TRUE(holds(page, "&lt;/script&gt;&lt;script&gt;alert(1)"));
}

TEST(Report, WithoutStepsSaysSo) {
  const std::string page = render_report({});
  EXPECT_TRUE(holds(page, "No step was recorded"));
  EXPECT_TRUE(holds(page, "</html>"));
  EXPECT_FALSE(holds(page, "<script"));
}

TEST(Report, ALossThatIsNotFiniteIsAHoleAndAWarning) {
  RunLog log = small_log();
  log.steps[2].loss = std::nan("");
  const std::string page = render_report(log);
  EXPECT_TRUE(holds(page, R"("loss":[10.0,5.0,null,2.5])"));
  EXPECT_TRUE(holds(page, "The loss was not finite in 1 step, first in step 3."));
  EXPECT_FALSE(holds(page, "nan,"));
}

TEST(Report, AllLossesNotFiniteIsStillAPage) {
  RunLog log = small_log();
  for (auto& step : log.steps) step.loss = std::nan("");
  log.validations = {{4, std::nan("")}};
  EXPECT_TRUE(holds(render_report(log), "<b>NaN</b>"));
}

TEST(Report, AnInterruptedRunSaysHowItEnded) {
  RunLog log = small_log();
  log.end->reason = "interrupted";
  EXPECT_TRUE(holds(render_report(log), "The run ended early: interrupted"));
}

TEST(Report, IsWrittenFromTheMetricsFile) {
  Folder folder;
  MetricsWriter writer(folder / "metrics.jsonl");
  writer.step(step_metrics(1));
  write_report(folder / "metrics.jsonl", folder / "report.html");
  EXPECT_TRUE(holds(text_of(folder / "report.html"), R"("loss":[10.0])"));
  EXPECT_THROW(write_report(folder / "none.jsonl", folder / "report.html"), IoError);
}

TEST(Curves, ThinningKeepsSpikesAndTheLastStep) {
  std::vector<StepMetrics> steps;
  for (int64_t i = 1; i <= 100'000; ++i) steps.push_back({.step = i, .loss = 1.0, .grad_norm = {}, .memory = {}});
  steps[54'321].loss = 50;
  steps[77'777].loss = std::nan("");
  const auto kept = thinned(steps, 1000);
  EXPECT_LE(kept.size(), 1000u);
  EXPECT_TRUE(std::is_sorted(kept.begin(), kept.end()));
  EXPECT_EQ(std::count(kept.begin(), kept.end(), 54'321u), 1);
  EXPECT_EQ(std::count(kept.begin(), kept.end(), 77'777u), 1);
  EXPECT_EQ(kept.back(), 99'999u);
}

TEST(Curves, ThinnedMemoryKeepsItsPeak) {
  std::vector<StepMetrics> steps;
  for (int64_t i = 1; i <= 10'000; ++i) steps.push_back({.step = i, .grad_norm = {}, .memory = {}});
  for (size_t i = 9; i < steps.size(); i += 10) steps[i].memory.pss_bytes = 1 << 20;
  steps[4'999].memory.pss_bytes = 8 << 20;
  EXPECT_EQ(measured_memory_mib(steps, 3000).size(), 1000u);
  const auto kept = measured_memory_mib(steps, 100);
  EXPECT_EQ(kept.size(), 100u);
  EXPECT_EQ(std::count_if(kept.begin(), kept.end(), [](const auto& point) { return point.value == 8; }), 1);
  EXPECT_TRUE(measured_memory_mib({}, 100).empty());
}

TEST(Curves, AShortRunIsKeptWhole) {
  const std::vector<StepMetrics> steps(7, step_metrics(1));
  EXPECT_EQ(thinned(steps, 7).size(), 7u);
  EXPECT_TRUE(thinned({}, 7).empty());
}

TEST(Curves, SmoothingAConstantGivesTheConstant) {
  const std::vector<StepMetrics> steps(50, step_metrics(4));
  for (const double loss : smoothed_losses(steps)) EXPECT_NEAR(loss, 2.5, 1e-12);
}

}  // namespace
}  // namespace trireme
