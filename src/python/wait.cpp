// While the library waits, other Python threads run, and Ctrl-C is heard.
#include <torch/csrc/Exceptions.h>

#include "python/bindings.h"
#include "trireme/base/wait_hook.h"

namespace trireme::python {
namespace {

class PythonWait final : public WaitHook {
 public:
  std::shared_ptr<void> begin() override {
    // An operator that torch runs with the lock held may have led here.
    if (!Py_IsInitialized() || !PyGILState_Check()) return nullptr;
    return std::make_shared<py::gil_scoped_release>();
  }

  void poll() override {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return;  // only on the main thread is there anything to hear
    python_error interrupted;               // what autograd and the binding hand on to Python as it is
    interrupted.persist();
    throw interrupted;
  }

  void interrupt(std::thread::native_handle_type thread) override {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    PyThreadState_SetAsyncExc(thread, PyExc_KeyboardInterrupt);
  }
};

}  // namespace

void bind_wait(py::module_& module) {
  set_wait_hook(std::make_shared<PythonWait>());
  module.def(
      "clear_wait_hook", [] { set_wait_hook(nullptr); }, "Before Python ends.");
}

}  // namespace trireme::python
