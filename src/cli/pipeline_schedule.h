// The schedule of a pipeline, as `trireme plan` shows it.
#pragma once

#include <CLI/App.hpp>
#include <optional>
#include <string>

#include "trireme/config/config.h"

namespace trireme::cli {

struct ScheduleFlags {
  std::string name;
  std::optional<int> stages, micro_batches, chunks;
  std::string times = "1,1,1,0";
  std::string svg;
  bool streams = false;
  /// Whether a schedule is given.
  bool has_any() const { return !name.empty() || stages || micro_batches || chunks; }
};

void declare_schedule(CLI::App& app, ScheduleFlags& flags);

/// The timeline of `flags`' schedule, or its streams; writes the drawing that they ask for. Throws ConfigError.
/// Requires name, stages and micro_batches.
std::string schedule_text(const ScheduleFlags& flags);
/// The same of a run's schedule; empty where its model has one stage.
std::string schedule_text(const Config& config, const ScheduleFlags& flags);

}  // namespace trireme::cli
