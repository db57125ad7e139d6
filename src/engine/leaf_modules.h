// Which modules of a model are leaves: their parameters are gathered all together.
#pragma once

#include <string>
#include <vector>

#include "trireme/config/config.h"

namespace torch::nn {
class Module;
}

namespace trireme {

/// The names of the modules that `options` chooses.
///
/// Throws    ConfigError: a name or suffix that no module has, with the names that come close.
std::vector<std::string> find_leaf_modules(const torch::nn::Module& module, const LeafModuleOptions& options);

}  // namespace trireme
