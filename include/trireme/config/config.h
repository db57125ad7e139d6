// The options of a run, gathered from each module's own options, and the reader of DeepSpeed's JSON dialect.
// docs/config.md lists every key: works, has no meaning here, or is refused by name.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "trireme/base/json.h"
#include "trireme/checkpoint/options.h"
#include "trireme/observe/monitor_options.h"
#include "trireme/observe/options.h"
#include "trireme/optim/lr_schedule.h"
#include "trireme/optim/optimizer.h"
#include "trireme/pager/leaf_modules.h"
#include "trireme/pager/pager.h"
#include "trireme/precision/precision.h"
#include "trireme/recompute/selective.h"
#include "trireme/recompute/tiled.h"
#include "trireme/sequence/sequence_parallel.h"
#include "trireme/tensor/partition.h"
#include "trireme/topology.h"

namespace trireme {

struct ParallelOptions;

/// train_batch_size == train_micro_batch_size_per_gpu * gradient_accumulation_steps * Degrees::data, always.
struct BatchSizes {
  int64_t train_batch_size = 1;
  int64_t train_micro_batch_size_per_gpu = 1;
  int64_t gradient_accumulation_steps = 1;
  bool operator==(const BatchSizes&) const = default;
};

/// Which activations are recomputed.
enum class RecomputeMode {
  kNone,
  kFull,       ///< the layers of modules that say where they begin (RecomputesLayers)
  kSelective,  ///< cheap operators of any module
};

/// The activations that backward computes again instead of keeping them.
struct RecomputeConfig {
  RecomputeMode mode = RecomputeMode::kNone;
  SelectivePolicy selective;  ///< read with kSelective
  bool operator==(const RecomputeConfig&) const = default;
};

/// How `trireme train` cuts its model into Degrees::pipe stages (a PipelineModule has options of its own for that), and
/// how any pipeline sums its gradients.
struct PipelineConfig {
  std::string schedule = "1f1b";               ///< as pipeline::make_schedule() knows it
  int64_t chunks = 1;                          ///< parts of the model on each stage
  std::string partition = "best";              ///< as PipelineModuleOptions::partition_method
  int64_t activation_checkpoint_interval = 0;  ///< layers that are recomputed together; 0: none
  /// At ZeRO 2 and 3: sum whole gradients and reduce them once per step, not once per micro-batch. Nothing: where the
  /// sums fit (docs/schedule.md).
  std::optional<bool> whole_gradients = {};
  bool operator==(const PipelineConfig&) const = default;
};

/// The report of a step's multiply-adds and times, module by module, which Python's engine writes (docs/profiling.md).
struct FlopsProfilerConfig {
  bool enabled = false;
  double recompute_fwd_factor = 0;  ///< not read: what backward computes again is counted
  int64_t profile_step = 1;         ///< optimizer steps before the one that is profiled
  int64_t module_depth = -1;        ///< of the modules whose sums are told; -1: each depth
  int64_t top_modules = 1;          ///< names at each depth
  bool detailed = true;             ///< the tree of all modules, too
  std::string output_file = {};     ///< empty: standard output
  bool operator==(const FlopsProfilerConfig&) const = default;
};

/// Every option of a run, each with a value.
struct Config {
  Degrees degrees;  ///< pipe * tensor * sequence * data == world size, always
  PipelineConfig pipeline;
  /// With Degrees::replicas above 1: weights are sharded within a replica, gradients and optimizer states over all
  /// data-parallel ranks (ZeRO++'s hpZ).
  bool states_over_replicas = false;
  /// Read where Degrees::sequence is above 1.
  SequenceAttention sequence_attention = SequenceAttention::kUlysses;
  /// `autotp_size` is Degrees::tensor, or 0 if that is 1. `tp_plan` is empty: the program gives it elsewhere.
  TensorParallelOptions tensor;
  BatchSizes batch;
  /// Nothing if the file names none: the program then brings its own optimizer, or only evaluates.
  std::optional<OptimizerOptions> optimizer;
  /// Nothing: the learning rate is constant.
  std::optional<LrScheduleOptions> scheduler;
  PrecisionOptions precision;
  /// Largest global L2 norm of the gradients; 0 switches clipping off. On by default, as in DeepSpeed's recent
  /// releases.
  double gradient_clipping = 1.0;
  PagerPolicy pager;
  DiskSpace disk;
  LeafModuleOptions leaf_modules;
  RecomputeConfig recompute;
  TilePolicy tiled;
  /// False: a trainable parameter that gets no gradient in a step is an error.
  bool ignore_unused_parameters = true;
  /// False: every step() ends a window and updates; its caller decides how many backward passes come before it.
  bool managed_gradient_accumulation = true;
  /// A progress line every so many optimizer steps; 0 never.
  int64_t steps_per_print = 0;
  CheckpointOptions checkpoint;
  ObserveOptions observe;
  FlopsProfilerConfig flops_profiler;
  /// The programs that are told of losses and learning rates.
  MonitorOptions monitors;

  bool operator==(const Config&) const = default;
};

/// Reads a file of DeepSpeed's (JSON with //, /* */ and # comments, or Hjson) or of Accelerate's (YAML) for
/// `world_size` ranks. Local and deterministic, so every rank that reads the same file gets the same Config. Deprecated
/// spellings are logged as warnings, and keys without a meaning here in one info line. `degrees`: how the program
/// itself splits the model; their `data` follows from the others and the world size, and is not read.
///
/// Throws    IoError: the file cannot be read.
///           ConfigError: kConfig for a syntax error, an unknown key, a wrong type, a value out of range or keys that
///           exclude each other, with the path of the key and the fix, degrees that do not divide the world size;
///           kBatchSize for a batch triple that does not multiply out; kUnsupported for something that is switched on,
///           but not there yet.
Config read_config(const std::filesystem::path& path, int world_size, const Degrees& degrees = {});

/// As read_config, from text. `origin` opens every error message.
Config parse_config(std::string_view text, int world_size, const Degrees& degrees = {},
                    const std::string& origin = "<string>");

/// As parse_config, from parsed JSON, e.g. after a program has changed some of it.
Config config_from_json(const Json& json, int world_size, const Degrees& degrees = {},
                        const std::string& origin = "<json>");

/// The configuration without a file: every default, micro-batches of one sample, no optimizer, ZeRO stage 0.
Config default_config(int world_size, const Degrees& degrees = {});

/// The options on which the plan of all axes depends (trireme/parallel/plan.h).
ParallelOptions parallel_options(const Config& config);

/// Every option, spelled out, in the same dialect: config_from_json(to_json(c), world_size, c.degrees) == c.
Json to_json(const Config& config);

/// to_json as the text of resolved_config.json.
std::string to_text(const Config& config);

}  // namespace trireme
