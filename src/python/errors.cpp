// Errors become Python exceptions by their code; python/trireme/errors.py has the types.
#include <torch/csrc/Exceptions.h>

#include <filesystem>

#include "python/bindings.h"
#include "trireme/base/error.h"

namespace trireme::python {
namespace {

const char* type_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kConfig:
      return "ConfigError";
    case ErrorCode::kBatchSize:
      return "BatchSizeError";
    case ErrorCode::kUnsupported:
      return "UnsupportedError";
    case ErrorCode::kShape:
      return "ShapeError";
    case ErrorCode::kState:
      return "StateError";
    case ErrorCode::kData:
      return "DataError";
    case ErrorCode::kIo:
      return "IoError";
    case ErrorCode::kCheckpoint:
      return "CheckpointError";
    case ErrorCode::kTornLoad:
      return "TornLoadError";
    case ErrorCode::kPeerLost:
      return "PeerLostError";
    case ErrorCode::kTimeout:
      return "CommTimeoutError";
    case ErrorCode::kDiverged:
      return "DivergedError";
    case ErrorCode::kInternal:
      break;
  }
  return "InternalError";
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
