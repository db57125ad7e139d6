#include "trireme/observe/monitors.h"

#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme {

void Monitors::add(std::string name, EventSink sink) {
  monitors_.push_back({.name = std::move(name), .sink = std::move(sink)});
}

void Monitors::write(std::span<const MonitorEvent> events) {
  for (Named& one : monitors_) {
    try {
      one.sink(events);
    } catch (const IoError& error) {
      if (!std::exchange(one.has_failed, true))
        log(LogLevel::kWarning, str(one.name, ": events are lost, and training goes on: ", error.what()));
    }
  }
}

namespace {

void add_files(Monitors& monitors, const std::string& key, const FileMonitorOptions& options) {
  const bool is_csv = key == "csv_monitor";
  TRIREME_CHECK(is_csv || key == "tensorboard", "no monitor writes files for `", key, "`.");
  const std::filesystem::path folder = std::filesystem::path(options.output_path) / options.job_name;
  try {
    monitors.add(key, is_csv ? make_csv_files(folder) : make_event_file(folder));
  } catch (const IoError& error) {
    throw IoError(str("`", key, ".output_path` is \"", options.output_path, "\", and `", key, ".job_name` \"",
                      options.job_name, "\": ", error.what(), "; name a folder that rank 0 can write, or set `", key,
                      ".enabled` to false"));
  }
}

}  // namespace

Monitors open_monitor(const std::string& key, const FileMonitorOptions& options) {
  Monitors monitors;
  add_files(monitors, key, options);
  return monitors;
}

Monitors open_monitors(const MonitorOptions& options) {
  Monitors monitors;
  if (options.tensorboard.enabled) add_files(monitors, "tensorboard", options.tensorboard);
  if (options.csv_monitor.enabled) add_files(monitors, "csv_monitor", options.csv_monitor);
  return monitors;
}

}  // namespace trireme
