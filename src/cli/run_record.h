// The record that a run leaves: progress on stderr, metrics.jsonl, report.html. Rank 0 writes; the other ranks only
// take part in what needs all of them.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cli/train_setup.h"
#include "trireme/base/log.h"
#include "trireme/base/stop_signals.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/engine/engine.h"
#include "trireme/observe/compute_rate.h"
#include "trireme/observe/metrics.h"
#include "trireme/observe/progress.h"

namespace trireme::cli {

/// The values that all ranks agree on after a step.
struct AgreedStep {
  double loss = 0;    ///< mean over the global batch
  bool stop = false;  ///< some rank was interrupted
  bool save = false;  ///< some rank was asked to save
};

/// Mean of the ranks' losses, and what any of them was asked for by a signal; a request to save is taken. Collective.
AgreedStep agree_on_step(Group& group, double loss, const StopSignals& signals);

class RunRecord {
 public:
  /// Writes resolved_config.json and what the run was started with, and opens metrics.jsonl, anew or behind the step
  /// that `engine` has resumed. While the record lives, what the library says on this thread for information becomes a
  /// note(). Throws IoError.
  RunRecord(const TrainSetup& setup, EngineBase& engine, Group& world);
  ~RunRecord();
  RunRecord(const RunRecord&) = delete;
  RunRecord& operator=(const RunRecord&) = delete;

  /// After every optimizer step. Collective.
  /// `lr` is the one that the step was taken with.
  void step(double loss, double lr);
  void validation(double loss);
  void checkpoint(const SavedCheckpoint& saved, int64_t step);
  void sample(const std::string& text);
  /// A line for whoever watches. Not with --quiet.
  void note(const std::string& line);
  /// A line that was asked for, or that a run ends with; also with --quiet.
  void say(const std::string& line);
  /// Ends the record and writes the report. Collective.
  void finish(const std::string& reason);
  /// The same after an error, by this rank alone. Never throws: the error that led here matters more.
  void fail(const std::string& reason) noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void pass_notes_on();
  void note_peak(const char* which, const std::vector<int64_t>& bytes_of_rank);
  void end(const RunEnd& end);
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  const TrainSetup& setup_;
  EngineBase& engine_;
  Group& world_;
  Clock::time_point start_ = Clock::now();
  Clock::time_point step_start_ = Clock::now();
  const ComputeRate compute_;
  int64_t peak_pss_bytes_ = 0;
  DiskUse disk_use_ = engine_.disk_use();   // until the last step
  double disk_wait_s_ = 0;                  // within steps
  double stepping_s_ = 0;                   // of runs that use a disk
  std::unique_ptr<MetricsWriter> metrics_;  // rank 0 only
  std::unique_ptr<Progress> progress_;      // rank 0 only
  LogSink log_before_;                      // rank 0 only
};

}  // namespace trireme::cli
