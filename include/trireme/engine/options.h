// Options of an engine's calls, under DeepSpeed's names.
#pragma once

#include <string>
#include <vector>

#include "trireme/training/options.h"

namespace trireme {

/// As DeepSpeed's call is named.
using InitializeOptions = TrainingOptions;

/// Options of an engine that tells RunEvents where its passes begin and end, so that it counts their FLOPs.
inline InitializeOptions with_profile(InitializeOptions options) {
  options.engine_counts_flops = true;
  return options;
}

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

}  // namespace trireme
