// The sections of a configuration that say which programs are told of a run's events.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace trireme {

/// `tensorboard` and `csv_monitor`: files in a folder.
struct FileMonitorOptions {
  bool enabled = false;
  std::string output_path = {};               ///< a folder; empty: the one where the program runs
  std::string job_name = "DeepSpeedJobName";  ///< the folder in it that has the files
  bool operator==(const FileMonitorOptions&) const = default;
};

/// `wandb`: a run of Weights & Biases, by its Python package.
struct WandbOptions {
  bool enabled = false;
  std::optional<std::string> group = {};
  std::optional<std::string> team = {};
  std::string project = "deepspeed";
  bool operator==(const WandbOptions&) const = default;
};

/// `comet`: an experiment of Comet, by its Python package.
struct CometOptions {
  bool enabled = false;
  int64_t samples_log_interval = 100;  ///< samples from one value of an event to its next one
  std::optional<std::string> project = {};
  std::optional<std::string> workspace = {};
  std::optional<std::string> api_key = {};
  std::optional<std::string> experiment_name = {};
  std::optional<std::string> experiment_key = {};
  std::optional<bool> online = {};
  std::optional<std::string> mode = {};
  bool operator==(const CometOptions&) const = default;
};

/// All of them.
struct MonitorOptions {
  FileMonitorOptions tensorboard;
  FileMonitorOptions csv_monitor;
  WandbOptions wandb;
  CometOptions comet;

  bool is_on() const { return tensorboard.enabled || csv_monitor.enabled || needs_python(); }
  /// One of those that are switched on goes through a Python package.
  bool needs_python() const { return wandb.enabled || comet.enabled; }
  bool operator==(const MonitorOptions&) const = default;
};

}  // namespace trireme
