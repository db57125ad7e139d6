// Whether all ranks were given the same configuration and model.
#pragma once

#include <set>
#include <string>

#include "trireme/comm/group.h"
#include "trireme/precision/precision.h"

namespace torch::nn {
class Module;
}

namespace trireme {

struct Config;
struct ModuleTensors;

/// Compares names, shapes, dtypes and what is frozen, of parameters and buffers, without the parameters in `unmanaged`.
/// Engine::Engine does so too. Collective.
///
/// Throws    ConfigError that names the first parameter or buffer that is not the same on all ranks, on every rank; one
///           that an engine cannot manage, on ranks that have it.
void check_same_model(Group& group, torch::nn::Module& module, const PrecisionOptions& precision,
                      const std::set<std::string>& unmanaged = {});
void check_same_model(Group& group, const ModuleTensors& tensors);

/// Compares every option. Collective. Throws ConfigError, on every rank, that names the first one that differs.
void check_same_config(Group& group, const Config& config);

}  // namespace trireme
