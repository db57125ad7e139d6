// A trace of what a rank did when, which https://ui.perfetto.dev and chrome://tracing open.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <vector>

#include "trireme/base/notices.h"
#include "trireme/observe/options.h"

namespace trireme {

/// Writes `options.output_path`/rank-N.json in the JSON array form of Chrome's trace events: complete events ("X") in
/// microseconds of the system's clock, a process for each rank. Tracks: steps, the threads of the program with methods,
/// stages, waits and operators, and the calls of each group. The file is readable while it grows, and after a crash:
/// the form needs no end.
///
/// Source    Trace Event Format, Google, "JSON Array Format".
class Timeline final : public NoticeListener {
 public:
  /// Makes the folder and the file; an older file of that name is replaced. Throws IoError (path, reason, fix).
  Timeline(int rank, const TimelineOptions& options);
  /// Writes what is left; a failure then is a warning of the log.
  ~Timeline() override;

  void hear(const Notice& notice) noexcept override;
  /// The number of steps that were recorded so far.
  int64_t recorded_steps() const;
  const std::filesystem::path& path() const;

 private:
  class Impl;
  const std::unique_ptr<Impl> impl_;
};

/// Joins the files of all ranks in `folder` into one trace, {"traceEvents": […]}. Returns the ranks that it has.
///
/// Throws    IoError: no files of ranks there, or one cannot be read, or `output` cannot be written.
std::vector<int> join_timelines(const std::filesystem::path& folder, const std::filesystem::path& output);

}  // namespace trireme
