// Options of what a training tells of itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme {

/// DeepSpeed's section `comms_logger`.
struct CommsLoggerOptions {
  bool enabled = false;
  bool verbose = false;                    ///< a line of the log for each call
  bool prof_all = true;                    ///< count all operations; else those of `prof_ops`
  bool debug = false;                      ///< the lines tell the method, the unit and the group
  std::vector<std::string> prof_ops = {};  ///< "all_reduce", "all_gather", …
  bool operator==(const CommsLoggerOptions&) const = default;
};

/// Ours: what each rank did when, for https://ui.perfetto.dev.
struct TimelineOptions {
  bool enabled = false;
  std::string output_path = "timeline";  ///< a folder: each rank has a file in it
  int64_t start_step = 2;                ///< the first optimizer step that is recorded, from 1
  int64_t steps = 10;                    ///< so many steps; 0: to the end
  bool operators = true;                 ///< libtorch's, too
  bool operator==(const TimelineOptions&) const = default;
};

struct ObserveOptions {
  CommsLoggerOptions comms_logger;
  bool wall_clock_breakdown = false;
  bool memory_breakdown = false;
  bool dump_state = false;
  TimelineOptions timeline;
  std::string record = {};  ///< ours: a folder, in which rank 0 writes metrics.jsonl and report.html; empty: none
  bool operator==(const ObserveOptions&) const = default;
};

}  // namespace trireme
