// metrics.jsonl: one JSON object per line for every step and event of a run. docs/observe.md lists the fields.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

/// The memory of a process.
struct MemoryUse {
  int64_t pss_bytes = 0;  ///< proportional: shared pages count 1/n
  int64_t rss_bytes = 0;  ///< resident: shared pages count fully
};

/// Memory of this process now; zeros where the system does not tell. Cost: walks the page tables, about 1 ms per GB.
MemoryUse memory_use();

/// The most memory that was resident in this process so far, in bytes; shared pages count fully. 0 where the system
/// does not tell. Cost: reads one small file.
int64_t peak_resident_bytes();

/// The use of a disk that has weights or optimizer states, by rank 0.
struct DiskMetrics {
  int64_t bytes = 0;       ///< that are taken
  int64_t read_bytes = 0;  ///< in this step, as the two below
  int64_t written_bytes = 0;
  double wait_ms = 0;  ///< that training waited for it
};

/// A line of a step.
struct StepMetrics {
  int64_t step = 0;                 ///< optimizer steps done, this one included
  int64_t samples = 0;              ///< since the start of training, all ranks
  int64_t tokens = 0;               ///< since the start of training, all ranks; 0: not known, and not written
  std::optional<double> loss = {};  ///< mean over the global batch; nothing where nobody has told it
  double learning_rate = 0;
  std::optional<double> grad_norm;  ///< before clipping
  double step_ms = 0;
  double tokens_per_s = 0;                     ///< all ranks; 0: not known, and not written
  MemoryUse memory = {};                       ///< the largest of any rank; zeros are not written
  int64_t skipped_steps = 0;                   ///< so far, because of an overflow
  std::optional<double> loss_scale = {};       ///< after this step; nothing where nothing computes in fp16
  std::optional<double> tflops_per_rank = {};  ///< 10^12 floating point operations per second of one rank, of this step
  std::optional<DiskMetrics> disk = {};
  std::optional<double> mfu = {};  ///< tflops_per_rank over the peak of a rank; nothing without a known one
};

/// Date and time now, as "2026-11-25 18:04:05 UTC".
std::string utc_now();

/// The versions that a run is recorded with, such as "Trireme 0.1.0, torch 2.11.0".
std::string software_versions();

/// Name of this host; empty where the system does not tell.
std::string host_name();

/// The first line of a run, or of a resumed part of it.
struct RunInfo {
  std::string model = {};
  int64_t parameters = 0;
  int ranks = 1;
  int zero_stage = 0;
  std::string dtype;  ///< of the weights, e.g. "bf16"
  int64_t total_steps = 0;
  int64_t first_step = 0;                  ///< steps done before: > 0 when resumed
  std::string config = "{}";               ///< resolved configuration, JSON text
  std::string data = {};                   ///< the data set in words, one line
  int64_t flops_per_token = 0;             ///< that tflops_per_rank counts; 0: not known
  std::optional<double> peak_tflops = {};  ///< of one rank, that mfu is the part of
  std::string started = {};                ///< date and time of this start, as utc_now() tells
  std::string host = {};                   ///< of rank 0
  std::string command = {};                ///< the command line, quoted for a shell
  std::string versions = {};               ///< software_versions()
};

/// The last line of a run.
struct RunEnd {
  int64_t step = 0;
  std::string reason = "finished";                 ///< or "interrupted", or an error's text
  double seconds = 0;                              ///< of this part of the run
  std::vector<int64_t> peak_memory_bytes_of_rank;  ///< proportional set size
  std::vector<int64_t> peak_resident_bytes_of_rank = {};
  std::vector<int64_t> peak_device_bytes_of_rank = {};  ///< of the allocator, and registered ones; zeros on the host
};

/// A checkpoint was written.
struct CheckpointEvent {
  int64_t step = 0;
  std::string tag;
  int64_t bytes = 0;
  double seconds = 0;
};

/// Appends to metrics.jsonl. One writer per file; use it on one rank.
///
/// Every line is handed to the system in one write before the call returns, so a crash loses at most the line being
/// written. Numbers that are not finite are written as the strings "nan", "inf" and "-inf".
class MetricsWriter {
 public:
  /// Starts anew: an existing file is replaced. Throws IoError.
  explicit MetricsWriter(const std::filesystem::path& path);
  /// Continues after `resumed_step`: lines of later steps, and a torn last line, are dropped. A missing file is
  /// created.
  MetricsWriter(const std::filesystem::path& path, int64_t resumed_step);
  ~MetricsWriter();
  MetricsWriter(const MetricsWriter&) = delete;
  MetricsWriter& operator=(const MetricsWriter&) = delete;

  // All throw IoError (path and reason).
  void run(const RunInfo& info);
  void step(const StepMetrics& metrics);
  void validation(int64_t step, double loss);
  void checkpoint(const CheckpointEvent& event);
  void sample(int64_t step, const std::string& prompt, const std::string& text);
  void end(const RunEnd& end);
  /// Any other event: `fields` is the JSON text of an object; "event" and "step" are added.
  void event(std::string_view name, int64_t step, const std::string& fields = "{}");

 private:
  void write_line(const std::string& line);

  std::filesystem::path path_;
  int file_ = -1;
};

/// A validation loss, as read.
struct ValidationPoint {
  int64_t step = 0;
  double loss = 0;
};

/// A generated text, as read.
struct SampleText {
  int64_t step = 0;
  std::string prompt;
  std::string text;
};

/// The contents of a metrics.jsonl.
struct RunLog {
  std::optional<RunInfo> run;  ///< the last one: a resumed run's
  std::vector<StepMetrics> steps;
  std::vector<ValidationPoint> validations;
  std::vector<CheckpointEvent> checkpoints;
  std::vector<SampleText> samples;
  std::optional<RunEnd> end;
  double seconds = 0;   ///< of all parts of the run
  std::string started;  ///< of the first part
};

/// Reads a metrics.jsonl. A torn last line is left out. Throws IoError; DataError naming file and line: not a JSON
/// object.
RunLog read_metrics(const std::filesystem::path& path);

}  // namespace trireme
