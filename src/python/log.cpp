// Messages of the library go to a Python callable.
#include "trireme/base/log.h"
#include "python/bindings.h"
#include "trireme/base/launcher_channel.h"

namespace trireme::python {

void bind_log(py::module_& module) {
  module.def(
      "set_log_sink",
      [](py::object sink) {
        if (sink.is_none()) {
          set_log_sink([](LogLevel, const std::string&) {});  // Python is about to end
          return;
        }
        // Freed with the GIL held, whoever replaces it.
        const std::shared_ptr<py::object> held(new py::object(std::move(sink)), [](py::object* object) {
          const py::gil_scoped_acquire gil;
          delete object;
        });
        set_log_sink([held](LogLevel level, const std::string& message) {
          const py::gil_scoped_acquire gil;
          const py::error_scope pending;  // autograd throws with Python's own error set, under which no call works
          try {
            (*held)(static_cast<int>(level), message);
          } catch (py::error_already_set& error) {
            // Ctrl-C is for the program, not for its logger.
            if (error.matches(PyExc_KeyboardInterrupt))
              PyErr_SetInterrupt();
            else
              error.discard_as_unraisable("trireme's log sink");
          }
        });
      },
      py::arg("sink").none(true),
      "Calls sink(level, message) for each message; level is 0 debug, 1 info, 2 warning, 3 error. None drops them.");
  module.def("leave_to_launcher", &leave_to_launcher, py::arg("text"),
             "Lets `trireme launch` show `text` as why this process ends; False where nobody does.");
}

}  // namespace trireme::python
