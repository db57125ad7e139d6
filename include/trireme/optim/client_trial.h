// Whether an optimizer of the program can be stepped, seen before anything is changed.
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "trireme/optim/options.h"

namespace trireme {

/// Lets `factory` make an optimizer of one-element stand-ins for the trainable ones of `parameters`, on `device`, and
/// drops it. Local.
///
/// Throws    ConfigError: it cannot be stepped; whatever `factory` throws.
void try_client_optimizer(const ClientOptimizerFactory& factory, const std::vector<ParameterSpec>& parameters,
                          c10::Device device);

}  // namespace trireme
