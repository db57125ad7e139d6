// Changes that a program has made in its optimizer's parameter groups.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "python/engine.h"

namespace trireme::python {

/// By number of the group: {"lr": ..., "betas": (...), ...}.
using GroupChanges = std::vector<std::pair<size_t, py::dict>>;

/// The next step's; what is not named stays. Throws as EngineBase::set_hyperparameters(). Requires the GIL.
void set_hyperparameters(EngineBase& engine, size_t group, const py::dict& values);
void set_hyperparameters(EngineBase& engine, const GroupChanges& changes);

}  // namespace trireme::python
