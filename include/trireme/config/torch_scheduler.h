// Schedulers of torch.optim.lr_scheduler in a configuration. Python's initialize() makes them; nothing else here does.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "trireme/base/json.h"

namespace trireme {

/// Removes the `scheduler` section from `config` and returns it, if it names a scheduler of torch.optim.lr_scheduler;
/// the rest can then be read. Nothing if it names none.
std::optional<Json> take_torch_scheduler(Json& config);

}  // namespace trireme
