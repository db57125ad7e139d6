// A trial of the program's optimizer before anything is changed: can it be stepped?
#pragma once

#include <c10/core/Device.h>

#include <vector>

#include "trireme/optim/options.h"

namespace trireme {

/// Lets `factory` make an optimizer over one-element tensors in place of the trainable `parameters`, on `device`, and
/// discards it. Local.
///
/// Throws    ConfigError: it cannot be stepped; whatever `factory` throws.
void try_client_optimizer(const ClientOptimizerFactory& factory, const std::vector<ParameterSpec>& parameters,
                          c10::Device device);

}  // namespace trireme
