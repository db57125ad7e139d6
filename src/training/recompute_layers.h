// Full recomputation by configuration.
#pragma once

#include "trireme/config/config.h"

namespace torch::nn {
class Module;
}

namespace trireme {

/// Switches full recomputation on, or off, in the parts of `module` that are RecomputesLayers.
///
/// Throws    ConfigError: on, and there is none.
void recompute_layers(torch::nn::Module& module, RecomputeMode mode);

}  // namespace trireme
