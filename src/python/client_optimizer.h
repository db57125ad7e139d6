// A Python optimizer as an engine's client optimizer.
#pragma once

#include "python/bindings.h"
#include "trireme/optim/options.h"

namespace trireme::python {

/// `make(parts, names)` returns a trireme.training.client_optimizer.PartOptimizer; called with the GIL.
ClientOptimizerFactory client_optimizer_factory(const py::object& make);

}  // namespace trireme::python
