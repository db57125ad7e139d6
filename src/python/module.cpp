#include "python/bindings.h"

namespace trireme::python {

std::shared_ptr<py::object> shared(py::object object) {
  return {new py::object(std::move(object)), [](py::object* held) {
            const py::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace trireme::python

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ library as the Python package uses it. Programs import trireme.";
  trireme::python::bind_errors(module);
  trireme::python::bind_log(module);
  trireme::python::bind_wait(module);
  trireme::python::bind_world(module);
  trireme::python::bind_config(module);
  trireme::python::bind_schedule(module);
  trireme::python::bind_topology(module);
  trireme::python::bind_pipeline(module);
  trireme::python::bind_engine(module);
  trireme::python::bind_pipeline_engine(module);
  trireme::python::bind_step_engine(module);
  trireme::python::bind_zero(module);
  trireme::python::bind_gradients(module);
  trireme::python::bind_tensor(module);
  trireme::python::bind_operators(module);
  trireme::python::bind_observe(module);
  trireme::python::bind_work(module);
  trireme::python::bind_checkpoint(module);
  trireme::python::bind_monitors(module);
}
