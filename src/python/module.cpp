#include "python/bindings.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The C++ library as the Python package uses it. Programs import trireme.";
  trireme::python::bind_errors(module);
  trireme::python::bind_log(module);
  trireme::python::bind_wait(module);
  trireme::python::bind_world(module);
  trireme::python::bind_config(module);
  trireme::python::bind_schedule(module);
  trireme::python::bind_engine(module);
  trireme::python::bind_zero(module);
  trireme::python::bind_checkpoint(module);
}
