// The events of a run (losses, learning rates, a program's own numbers), written for programs that draw curves of them.
// docs/observe.md says how the files look.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "trireme/observe/monitor_options.h"

namespace trireme {

/// A point of the curve `name`.
struct MonitorEvent {
  std::string name;
  double value = 0;
  int64_t x = 0;  ///< in the engine's own events the samples so far, over all ranks
  bool operator==(const MonitorEvent&) const = default;
};

/// Takes events, on one rank. May throw IoError.
using EventSink = std::function<void(std::span<const MonitorEvent> events)>;

/// TensorBoard's event file: a new one in `folder` for each start of a program, since TensorBoard joins the files of a
/// folder. Values are fp32 there. Throws IoError, as the result does; then the file has all earlier events, and goes on
/// later. Events are handed to the system before a call returns.
EventSink make_event_file(const std::filesystem::path& folder);

/// A CSV file in `folder` for each name of an event. A file that is there goes on. Throws IoError: the folder cannot be
/// made, or no file be written there; the result as make_event_file()'s.
EventSink make_csv_files(const std::filesystem::path& folder);

/// Monitors that get the same events. Move-only.
class Monitors {
 public:
  /// `name` opens what is said about it.
  void add(std::string name, EventSink sink);
  bool is_empty() const { return monitors_.empty(); }
  /// Hands `events` to all of them. Where one fails, as on a full disk, it loses these events, which is a warning the
  /// first time; a run does not end by its curves.
  void write(std::span<const MonitorEvent> events);

 private:
  struct Named {
    std::string name;
    EventSink sink;
    bool has_failed = false;
  };
  std::vector<Named> monitors_;
};

/// The files that `options` switch on. Throws IoError that names the key, its value and the fix.
Monitors open_monitors(const MonitorOptions& options);

/// The monitor of the section `key`, "tensorboard" or "csv_monitor", whether it is switched on or not. Throws as
/// open_monitors(); Error(kInternal): another key.
Monitors open_monitor(const std::string& key, const FileMonitorOptions& options);

}  // namespace trireme
