// From flags to everything that a training run needs, checked before anything is written.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "cli/run_flags.h"
#include "cli/run_lock.h"
#include "cli/train_options.h"
#include "trireme/base/json.h"
#include "trireme/config/config.h"
#include "trireme/data/dataset.h"
#include "trireme/data/tokenizer.h"
#include "trireme/models/language_model.h"

namespace trireme::cli {

struct TrainSetup {
  TrainOptions options;
  std::string name;  ///< of the model: its built-in name, or that of the file
  Config config;
  ModelOptions model;
  DataSplits data;
  std::filesystem::path out;
  std::shared_ptr<const Tokenizer> tokenizer = {};  ///< null: bytes, or tokens of files; shared: with `data`'s options
  RunFlags flags = {};                              ///< of rank 0, which keeps them in `out`

  std::filesystem::path checkpoints() const { return out / "checkpoints"; }
  /// Checkpoints to keep, 0 all: a run of many saves must not fill the disk because nobody said anything.
  int keep_last() const {
    constexpr int kKept = 3;
    const int configured = config.checkpoint.keep_last > 0 ? config.checkpoint.keep_last : kKept;
    return static_cast<int>(options.keep.value_or(configured));
  }
};

/// Reads and checks configuration, model and data for `world_size` ranks. Local; the same on every rank.
///
/// Throws    ConfigError, DataError, IoError, as their readers do; ConfigError: flags and configuration that contradict
///           each other, a run in `out` that would be overwritten, or that --resume cannot continue with these flags.
TrainSetup prepare_training(const TrainOptions& options, int world_size);

/// Makes the plan of slices that each rank will make, where the configuration cuts layers. Local.
///
/// Throws    ConfigError, as make_partition_plan().
void check_slices(const TrainSetup& setup);

/// A key of a configuration that said "auto".
struct FilledIn {
  std::string key;     ///< its path, such as optimizer.params.lr
  std::string value;   ///< what stands there now, as JSON
  std::string source;  ///< the flag that it comes from
};

/// Puts the flags' values where `config` says "auto" and the library has no value of its own to put there. Pure.
std::vector<FilledIn> fill_in_autos(Json& config, const TrainOptions& options);

/// The configuration with what it leaves to the command: an absent optimizer, batch size and, where they say "auto",
/// learning rate, total and warm-up steps. `origin` names the file in errors. Pure.
///
/// Throws    ConfigError: --batch beside a batch size in the file.
Json complete_config(Json config, const TrainOptions& options, const std::string& origin);

/// The name of a run of this model: the model's built-in name, or that of its file or its file's folder.
std::string name_of_model(const std::string& name_or_path);

/// The folder of the run: `options.out`, or runs/NAME, or with that taken the next free runs/NAME-2, …; with --resume
/// the last one that is there. A folder that a run is writing to counts as taken.
///
/// Throws    ConfigError: `options.out` holds a run and --resume is not given.
std::filesystem::path choose_output(const TrainOptions& options, const std::string& name);

/// Takes the folder `setup.out`. Where it is a free one that choose_output() found and another run was quicker, takes
/// the next free one and changes `setup.out`: of runs that start at once each gets its own.
///
/// Throws    ConfigError, as RunLock does; no file can be made where checkpoints go.
RunLock take_output(TrainSetup& setup);

}  // namespace trireme::cli
