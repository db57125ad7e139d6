// Errors become Python exceptions by their code; python/trireme/errors.py has the types.
#include <torch/csrc/Exceptions.h>

#include <filesystem>

#include "python/bindings.h"
#include "trireme/base/error.h"
#include "trireme/base/error_hook.h"

namespace trireme::python {
namespace {

const char* type_name(ErrorCode code) {
  if (code == ErrorCode::kTornLoad) return "TornLoadError";
  if (code == ErrorCode::kTimeout) return "CommTimeoutError";  // TimeoutError is Python's own
  return name_of(code);
}

void raise(const Error& error) {
  const py::object type = py::module_::import("trireme.errors").attr(type_name(error.code()));
  PyErr_SetString(type.ptr(), error.what());
}

/// libtorch's bindings know Python's own errors alone.
void throw_as_pythons(const Error& error) {
  const py::gil_scoped_acquire gil;
  raise(error);
  python_error raised;
  raised.persist();
  throw raised;
}

void translate(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (python_error& raised) {  // Python code that autograd called raised it
    raised.restore();
  } catch (const Error& failed) {
    raise(failed);
  } catch (const std::filesystem::filesystem_error& failed) {
    PyErr_SetString(PyExc_OSError, failed.what());
  } catch (const c10::Error& failed) {
    PyErr_SetString(PyExc_RuntimeError, failed.what_without_backtrace());
  }
}

}  // namespace

void bind_errors(py::module_&) {
  py::register_local_exception_translator(&translate);
  set_error_hook(&throw_as_pythons);
}

}  // namespace trireme::python
