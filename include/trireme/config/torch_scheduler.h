// Schedulers of torch.optim.lr_scheduler in a configuration. Python's initialize() makes them; nothing else here does.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "trireme/base/json.h"

namespace trireme {

/// Takes the `scheduler` section out of `config` where it names a scheduler of torch.optim.lr_scheduler, so that the
/// rest can be read. Nothing where it names none.
std::optional<Json> take_torch_scheduler(Json& config);

}  // namespace trireme
