// Errors become Python exceptions by their code; python/trireme/errors.py has the types.
#include <torch/csrc/Exceptions.h>

#include <filesystem>

#include "python/bindings.h"
#include "trireme/base/error.h"

namespace trireme::python {
namespace {

const char* type_name(ErrorCode code) {
  if (code == ErrorCode::kTornLoad) return "TornLoadError";
  if (code == ErrorCode::kTimeout) return "CommTimeoutError";  // TimeoutError is Python's own
  return name_of(code);
}

void translate(std::exception_ptr error) {
  try {
    std::rethrow_exception(std::move(error));
  } catch (python_error& raised) {  // Python code that autograd called raised it
    raised.restore();
  } catch (const Error& failed) {
    const py::object type = py::module_::import("trireme.errors").attr(type_name(failed.code()));
    PyErr_SetString(type.ptr(), failed.what());
  } catch (const std::filesystem::filesystem_error& failed) {
    PyErr_SetString(PyExc_OSError, failed.what());
  } catch (const c10::Error& failed) {
    PyErr_SetString(PyExc_RuntimeError, failed.what_without_backtrace());
  }
}

}  // namespace

void bind_errors(py::module_&) { py::register_local_exception_translator(&translate); }

}  // namespace trireme::python
