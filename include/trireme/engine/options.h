// Options of an engine's calls, under DeepSpeed's names.
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

#include "trireme/config/config.h"
#include "trireme/optim/options.h"
#include "trireme/training/options.h"

namespace trireme {

/// Options of initialize() and of the engines' constructors.
struct InitializeOptions {
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
  /// With layers that are cut: as TrainingOptions has them.
  std::optional<PartitionModel> partition_model = {};
  std::vector<std::pair<std::string, std::string>> tp_plan = {};
  std::optional<std::set<std::string>> own_slices = {};
  bool takes_sizes_from_inputs = false;
};

/// Options of backward().
struct BackwardOptions {
  bool retain_graph = false;  ///< another backward goes through the same graph
  bool create_graph = false;  ///< gradients of gradients will be taken
  /// False: `loss` is already divided by the gradient accumulation steps.
  bool scale_wrt_gas = true;
};

/// Options of offload_states().
struct OffloadOptions {
  /// Names out of "optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"; empty: all.
  std::vector<std::string> include = {};
  std::string device = "cpu";
};

/// The options of a Training over `world_size` ranks. Throws ConfigError and IoError as read_config().
TrainingOptions resolve(const InitializeOptions& options, int world_size);

}  // namespace trireme
