// The Python module trireme._core: one function per part of the library, each of which only forwards.
//
// What waits for other ranks or for the disk is called without the GIL (WithoutGil). Exceptions of the library become
// those of python/trireme/errors.py.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>

#include "trireme/comm/group.h"

namespace trireme::python {

namespace py = pybind11;
using WithoutGil = py::call_guard<py::gil_scoped_release>;

/// A group that Python holds; null after close().
struct WorldHandle;
Group& group_of(const WorldHandle& world);

/// `object`, for C++ threads that may let it go without the GIL.
std::shared_ptr<py::object> shared(py::object object);

void bind_errors(py::module_& module);
void bind_log(py::module_& module);
void bind_wait(py::module_& module);
void bind_world(py::module_& module);
void bind_config(py::module_& module);
void bind_engine(py::module_& module);
void bind_zero(py::module_& module);
void bind_gradients(py::module_& module);
void bind_checkpoint(py::module_& module);
void bind_schedule(py::module_& module);
void bind_topology(py::module_& module);
void bind_pipeline(py::module_& module);
void bind_pipeline_engine(py::module_& module);
void bind_step_engine(py::module_& module);
void bind_tensor(py::module_& module);
void bind_operators(py::module_& module);
void bind_observe(py::module_& module);
void bind_work(py::module_& module);
void bind_monitors(py::module_& module);

}  // namespace trireme::python
