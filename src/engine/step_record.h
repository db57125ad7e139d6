// The record that the key `trireme.record` asks for: metrics.jsonl and report.html of a run.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "trireme/observe/metrics.h"

namespace trireme {

/// Writes a folder's metrics.jsonl, step by step, and now and then report.html. On one rank. What fails after the
/// beginning, as on a full disk, is a warning the first time: a run does not end by its curves.
class StepRecord {
 public:
  /// Makes the folder. Throws IoError: it cannot be made, or the file not be written there; ConfigError: another record
  /// of this process is written there.
  explicit StepRecord(const std::filesystem::path& folder);
  /// Whether another record of this process is written into `folder`, by whatever name.
  static bool is_taken(const std::filesystem::path& folder);
  /// As end(), because of an error where one is on its way.
  ~StepRecord();
  StepRecord(const StepRecord&) = delete;
  StepRecord& operator=(const StepRecord&) = delete;

  /// The description of the run, before its first step.
  void describe(RunInfo info) { info_ = std::move(info); }
  /// A step, with the tokens of all ranks in it (0: not known); its time is from the step before, or from the
  /// beginning, and sets `step_ms` and `tokens_per_s`. The first one of the process opens the file: behind the lines of
  /// earlier steps if it is not the run's first one, else anew, with an older file kept as metrics.before.jsonl.
  void step(StepMetrics metrics, int64_t tokens_of_step);
  void checkpoint(const CheckpointEvent& event);
  /// The last lines, with the `reason` of the end, and the report; nothing before the first step, and the second time.
  void end(const std::string& reason) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void open(int64_t first_step);
  template <class Work>
  void try_to(const Work& work) noexcept;

  const std::filesystem::path folder_, path_;  // canonical
  RunInfo info_;
  std::optional<MetricsWriter> metrics_;
  int64_t step_ = 0;
  Clock::time_point begin_ = Clock::now(), step_begin_ = begin_, report_due_ = begin_;
  bool has_failed_ = false, has_ended_ = false;
};

}  // namespace trireme
