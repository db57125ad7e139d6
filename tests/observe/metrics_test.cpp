#include "trireme/observe/metrics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/observe/fixture.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using observe_test::Folder;
using observe_test::step_metrics;
using observe_test::text_of;

TEST(Metrics, ComeBackAsTheyWereWritten) {
  Folder folder;
  MetricsWriter writer(folder / "metrics.jsonl");
  writer.run({.model = "llama-3m",
              .parameters = 3'000'000,
              .ranks = 2,
              .zero_stage = 3,
              .dtype = "bf16",
              .total_steps = 7,
              .first_step = 0,
              .config = R"({"a":{"b":1}})",
              .data = "text",
              .flops_per_token = 16'000'000,
              .peak_tflops = 989.4});
  auto step = step_metrics(4);
  step.tflops_per_rank = 0.32;
  step.mfu = 0.25;
  step.disk = {.bytes = 100, .read_bytes = 70, .written_bytes = 30, .wait_ms = 2.5};
  writer.step(step);
  writer.validation(4, 1.25);
  writer.checkpoint({.step = 4, .tag = "step4", .bytes = 99, .seconds = 0.5});
  writer.sample(4, "def ", "f():\n");
  writer.end({.step = 4,
              .reason = "interrupted",
              .seconds = 3,
              .peak_memory_bytes_of_rank = {10, 20},
              .peak_resident_bytes_of_rank = {30, 40},
              .peak_device_bytes_of_rank = {50, 60}});

  const RunLog log = read_metrics(folder / "metrics.jsonl");
  EXPECT_EQ(log.run->model, "llama-3m");
  EXPECT_EQ(log.run->parameters, 3'000'000);
  EXPECT_EQ(log.run->config, R"({"a":{"b":1}})");
  EXPECT_EQ(log.run->flops_per_token, 16'000'000);
  EXPECT_EQ(log.run->peak_tflops, 989.4);
  ASSERT_EQ(log.steps.size(), 1u);
  EXPECT_EQ(log.steps[0].tokens, 3200);
  EXPECT_EQ(log.steps[0].loss, 2.5);
  EXPECT_EQ(log.steps[0].grad_norm, 0.5);
  EXPECT_EQ(log.steps[0].tflops_per_rank, 0.32);
  EXPECT_EQ(log.steps[0].mfu, 0.25);
  ASSERT_TRUE(log.steps[0].disk);
  EXPECT_EQ(log.steps[0].disk->bytes, 100);
  EXPECT_EQ(log.steps[0].disk->read_bytes, 70);
  EXPECT_EQ(log.steps[0].disk->written_bytes, 30);
  EXPECT_EQ(log.steps[0].disk->wait_ms, 2.5);
  EXPECT_EQ(log.steps[0].memory.pss_bytes, 3 << 20);
  EXPECT_EQ(log.validations[0].loss, 1.25);
  EXPECT_EQ(log.checkpoints[0].tag, "step4");
  EXPECT_EQ(log.samples[0].text, "f():\n");
  EXPECT_EQ(log.end->reason, "interrupted");
  EXPECT_EQ(log.end->peak_memory_bytes_of_rank, (std::vector<int64_t>{10, 20}));
  EXPECT_EQ(log.end->peak_resident_bytes_of_rank, (std::vector<int64_t>{30, 40}));
  EXPECT_EQ(log.end->peak_device_bytes_of_rank, (std::vector<int64_t>{50, 60}));
  EXPECT_EQ(log.seconds, 3);
}

TEST(Metrics, WhatIsNotKnownIsLeftOut) {
  Folder folder;
  MetricsWriter writer(folder / "metrics.jsonl");
  writer.run({});
  writer.step(step_metrics(1));
  for (const char* key : {"flops_per_token", "peak_tflops", "tflops_per_rank", "mfu", "loss_scale"})
    EXPECT_EQ(text_of(folder / "metrics.jsonl").find(key), std::string::npos) << key;
  const RunLog log = read_metrics(folder / "metrics.jsonl");
  EXPECT_FALSE(log.run->peak_tflops);
  EXPECT_FALSE(log.steps[0].tflops_per_rank);
}

TEST(Metrics, ALineIsInTheFileWhenTheCallReturns) {
  Folder folder;
  MetricsWriter writer(folder / "metrics.jsonl");
  writer.step(step_metrics(1));
  EXPECT_EQ(read_metrics(folder / "metrics.jsonl").steps.size(), 1u);
}

TEST(Metrics, NumbersThatAreNotFiniteSurvive) {
  Folder folder;
  MetricsWriter writer(folder / "metrics.jsonl");
  auto step = step_metrics(1);
  step.loss = std::nan("");
  step.grad_norm = std::numeric_limits<double>::infinity();
  step.loss_scale = 512;
  writer.step(step);
  const RunLog log = read_metrics(folder / "metrics.jsonl");
  EXPECT_TRUE(std::isnan(log.steps[0].loss.value()));
  EXPECT_EQ(log.steps[0].grad_norm, std::numeric_limits<double>::infinity());
  EXPECT_EQ(log.steps[0].loss_scale, 512);
}

TEST(Metrics, AResumedRunDropsTheStepsThatItRepeats) {
  Folder folder;
  {
    MetricsWriter writer(folder / "metrics.jsonl");
    for (int64_t step = 1; step <= 9; ++step) writer.step(step_metrics(step));
    writer.validation(9, 1);
  }
  MetricsWriter resumed(folder / "metrics.jsonl", 5);
  resumed.step(step_metrics(6));
  const RunLog log = read_metrics(folder / "metrics.jsonl");
  ASSERT_EQ(log.steps.size(), 6u);
  for (int64_t i = 0; i < 6; ++i) EXPECT_EQ(log.steps[i].step, i + 1);
  EXPECT_TRUE(log.validations.empty());
}

TEST(Metrics, ATornLastLineIsDroppedOnResumeAndIgnoredByReaders) {
  Folder folder;
  {
    MetricsWriter writer(folder / "metrics.jsonl");
    writer.step(step_metrics(1));
  }
  std::ofstream(folder / "metrics.jsonl", std::ios::app) << R"({"step":2,"lo)";
  EXPECT_EQ(read_metrics(folder / "metrics.jsonl").steps.size(), 1u);
  MetricsWriter resumed(folder / "metrics.jsonl", 2);
  resumed.step(step_metrics(2));
  EXPECT_EQ(read_metrics(folder / "metrics.jsonl").steps.size(), 2u);
}

TEST(Metrics, ANewRunReplacesTheFile) {
  Folder folder;
  { MetricsWriter(folder / "metrics.jsonl").step(step_metrics(1)); }
  MetricsWriter again(folder / "metrics.jsonl");
  EXPECT_EQ(text_of(folder / "metrics.jsonl"), "");
}

TEST(Metrics, BytesThatAreNoTextDoNotBreakTheFile) {
  Folder folder;
  MetricsWriter writer(folder / "metrics.jsonl");
  writer.sample(1, "x", std::string("\xff\xfe ok"));
  EXPECT_EQ(read_metrics(folder / "metrics.jsonl").samples[0].text, "\xEF\xBF\xBD\xEF\xBF\xBD ok");
}

TEST(Metrics, ALineThatIsNoJsonIsNamed) {
  Folder folder;
  std::ofstream(folder / "metrics.jsonl") << R"({"step":1,"loss":1})"
                                          << "\nhello\n";
  try {
    (void)read_metrics(folder / "metrics.jsonl");
    FAIL() << "accepted";
  } catch (const DataError& error) {
    EXPECT_NE(std::string(error.what()).find("metrics.jsonl:2:"), std::string::npos) << error.what();
  }
}

TEST(Metrics, AFolderThatIsNotThereIsAnIoErrorWithThePath) {
  try {
    MetricsWriter writer("/nonexistent-folder/metrics.jsonl");
    FAIL() << "accepted";
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("/nonexistent-folder/metrics.jsonl"), std::string::npos);
  }
}

TEST(Metrics, MemoryIsProportionalAndResident) {
  const MemoryUse use = memory_use();
  EXPECT_GT(use.pss_bytes, 1 << 20);
  EXPECT_GE(use.rss_bytes, use.pss_bytes);
}

TEST(Metrics, ThePeakOfResidentMemoryStaysWhenTheMemoryIsGivenBack) {
  constexpr size_t kBytes = size_t{64} << 20;
  const int64_t before = memory_use().rss_bytes;
  std::vector<char>(kBytes, 1);
  // The kernel counts pages per thread and adds them up now and then: it may be some behind.
  constexpr int64_t kUncounted = 4 << 20;
  EXPECT_GT(peak_resident_bytes(), before + static_cast<int64_t>(kBytes) - kUncounted);
  EXPECT_LT(memory_use().rss_bytes, before + static_cast<int64_t>(kBytes) - kUncounted);
}

}  // namespace
}  // namespace trireme
