// The values that every engine tells without arguments: one table, from which the core and the façades of Python have
// their properties and methods.
#pragma once

#include "python/engine.h"

namespace trireme::python {

/// Binds every getter to `engine`. Those that façades have too are the module's ENGINE_GETTERS: (name, whether it is a
/// method, docstring); the names of the others are CORE_GETTERS.
void bind_getters(py::module_& module, EngineBaseClass& engine);

}  // namespace trireme::python
