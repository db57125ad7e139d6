// Options of a Training and of its calls, and the result of a load.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "trireme/checkpoint/checkpoint.h"
#include "trireme/config/config.h"
#include "trireme/optim/options.h"
#include "trireme/tensor/partition.h"

namespace trireme {

/// The optimizer of the parameters.
struct OptimizerChoice {
  std::optional<OptimizerOptions> optimizer = {};  ///< one of Trireme's
  /// Parameters with hyperparameters of their own, such as no weight decay for biases and norms.
  std::vector<ParameterGroup> parameter_groups = {};
  /// Any torch::optim optimizer over this rank's parts of parameters, in place of `optimizer`.
  ClientOptimizerFactory client = {};
  LrScheduleOptions schedule = {};
  /// The loss scale of fp16, for an optimizer that comes after the engine; nothing: the configuration's.
  std::optional<LossScaleChoice> loss_scale = {};

  bool is_empty() const { return !optimizer && !client; }
};

/// Options of a Training, of initialize() and of the engines' constructors.
struct TrainingOptions {
  /// A file that read_config() reads (DeepSpeed's JSON, Accelerate's YAML), or a Config; nothing: default_config(),
  /// which has no optimizer.
  std::variant<std::monostate, std::filesystem::path, Config> config = {};
  /// How the program itself splits the model over the ranks, for a file or the defaults; a Config has its own.
  Degrees degrees = {};
  /// Rank 0 writes resolved_config.json, every option spelled out, into this folder; empty: nowhere.
  std::filesystem::path output = {};
  /// Parameters with hyperparameters of their own, such as no weight decay for biases and norms.
  std::vector<ParameterGroup> parameter_groups = {};
  /// Any torch::optim optimizer over this rank's parts of parameters, in place of one that the configuration names.
  ClientOptimizerFactory client_optimizer = {};
  /// Returns the module's present buffers, by name; nothing: module.named_buffers() does. For a module that mirrors one
  /// of another language, which may replace its buffers.
  std::function<std::vector<std::pair<std::string, at::Tensor>>()> present_buffers = {};
  /// Names of the module's parameters that stay the program's own: neither sharded, updated nor saved.
  std::set<std::string> unmanaged = {};
  /// Name of an unmanaged parameter that is a copy -> name of the parameter that it follows, on any stage.
  std::map<std::string, std::string> copies = {};
  /// Other name -> name of the parameter, for ties that the module does not show: those with copies on other ranks.
  std::map<std::string, std::string> aliases = {};
  /// With Degrees::tensor above 1: type and head counts of the model, by which its layers are cut; its parameters are
  /// the module's. Nothing: unknown.
  std::optional<PartitionModel> partition_model = {};
  std::vector<std::pair<std::string, std::string>> tp_plan = {};  ///< as TensorParallelOptions::tp_plan
  /// Where the ranks have an axis "model": names of the parameters that the program has cut over it; others it has
  /// whole.
  std::optional<std::set<std::string>> own_slices = {};
  /// The module reads the sizes of its inputs only, never those of activations or parameters, which may be a rank's
  /// part. Required by tensor_parallel.sequence_parallel, and by "sequence" beside "tensor".
  bool takes_sizes_from_inputs = false;
  /// Called on every rank of the model with the configuration, before the module is changed: for a façade that has to
  /// refuse something, or to open it. May be collective.
  std::function<void(const Config& config, Group& model)> prepare = {};
  /// An engine's caller has monitors of its own, and hands them what EngineBase::take_step_events() gives; false: the
  /// engine opens those of the configuration.
  bool takes_events = false;
  /// The module is a stage's part of an unmodified model, over which a step function runs (StepEngine).
  bool has_ownership = false;
  /// The caller writes a record of the run: TRIREME_RECORD asks for no other one.
  bool has_record = false;
  /// The caller writes the report that Config::flops_profiler asks for, or the engine does; others refuse it.
  bool has_flops_profiler = false;
  bool engine_counts_flops = false;
};

/// The configuration of `options` over `world_size` ranks, with TRIREME_RECORD where no key says that; a Config is
/// refused for the same reasons as a file. Throws ConfigError and IoError as read_config().
Config resolved_config(const TrainingOptions& options, int world_size);

/// Options of Training::save().
struct SaveCheckpointOptions {
  std::string tag = {};             ///< empty: "global_step" and the number of steps
  std::string client_state = "{}";  ///< JSON text that load_checkpoint() gives back; the same on every rank
  /// Leaves out parameters that were frozen at initialize(); a load of the checkpoint leaves them alone.
  bool exclude_frozen_parameters = false;
  std::optional<int> keep_last = {};    ///< nothing: the configuration's checkpoint.keep_last; 0: all stay
  std::optional<bool> async_save = {};  ///< nothing: the configuration's checkpoint.async_save
  UpdateLatest latest = UpdateLatest::kYes;
  FileSystem* files = nullptr;  ///< where the bytes go; nullptr: POSIX files
};

/// Options of Training::load().
struct LoadCheckpointOptions {
  std::string tag = {};                  ///< empty: the one that the folder's `latest` names
  bool load_module = true;               ///< false: weights, masters and buffers stay as they are
  bool load_module_strict = true;        ///< false: tensors that only one side has are left alone
  bool load_optimizer_states = true;     ///< masters, moments, step counts and hyperparameters but the learning rate
  bool load_lr_scheduler_states = true;  ///< the learning rates
  bool load_module_only = false;         ///< weights and buffers, nothing else
  std::optional<Verify> verify = {};     ///< nothing: the configuration's checkpoint.verify
};

/// Options of Training::export_weights().
struct SaveModelOptions {
  std::string name = "model.safetensors";  ///< or one that ends in .bin, .pt or .pth: for Python's torch.load()
  bool exclude_frozen_parameters = false;
  FileSystem* files = nullptr;  ///< where the bytes go; nullptr: POSIX files
};

/// The result of Training::load().
struct LoadedState {
  std::string tag;
  std::string client_state;  ///< JSON text, as saved
};

}  // namespace trireme
