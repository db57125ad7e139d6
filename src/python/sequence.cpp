// Parts of samples and layers, of an engine over a Python module.
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/pybind.h>

#include "python/engine.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/base/torch/nodes.h"
#include "trireme/intercept.h"
#include "trireme/intercept/random_streams.h"

namespace trireme::python {
namespace {

py::tuple cut(EngineBase& engine, const std::optional<at::Tensor>& input_ids, const std::optional<at::Tensor>& labels,
              const std::optional<at::Tensor>& position_ids, const std::optional<at::Tensor>& attention_mask,
              int64_t dim) {
  const SequenceInputs part = engine.cut({.input_ids = input_ids.value_or(at::Tensor()),
                                          .labels = labels.value_or(at::Tensor()),
                                          .position_ids = position_ids.value_or(at::Tensor()),
                                          .attention_mask = attention_mask.value_or(at::Tensor()),
                                          .dim = dim});
  return py::make_tuple(part.input_ids, part.labels, part.position_ids, part.attention_mask);
}

/// A class of tensors whose __getitem__ Python replaces becomes a sequence, which no tensor is: torch.tensor() would
/// look into the tensors without dims of a list.
void forget_sequence(const py::type& tensors) {
  if (PySequenceMethods* const slots = reinterpret_cast<PyTypeObject*>(tensors.ptr())->tp_as_sequence)
    slots->sq_item = nullptr;
}

/// As torch runs a backward pass for Python, by the engine that C++ programs get, which knows of parts.
py::tuple run_backward(const std::vector<at::Tensor>& roots, const std::vector<std::optional<at::Tensor>>& given,
                       bool keep_graph, bool create_graph, const std::vector<at::Tensor>& inputs,
                       bool allow_unreachable, bool accumulate_grad) {
  std::vector<at::Tensor> gradients, found;
  for (const auto& gradient : given) gradients.push_back(gradient.value_or(at::Tensor()));
  {
    const py::gil_scoped_release no_gil;
    if (accumulate_grad)
      torch::autograd::backward(roots, gradients, keep_graph, create_graph, inputs);
    else
      found = torch::autograd::grad(roots, inputs, gradients, keep_graph, create_graph, allow_unreachable);
  }
  py::tuple result(found.size());
  for (size_t i = 0; i < found.size(); ++i)
    result[i] = found[i].defined() ? py::cast(found[i]) : py::object(py::none());
  return result;
}

/// Calls `hook` with the gradient of `part`, a part, and takes what it gives in its place. Gives its place, for
/// removal.
unsigned register_hook(const at::Tensor& part, py::object hook) {
  const std::shared_ptr<py::object> held(new py::object(std::move(hook)), [](py::object* one) {
    const py::gil_scoped_acquire gil;  // graphs die on any thread
    delete one;
  });
  return part.register_hook([held](const at::Tensor& gradient) {
    const py::gil_scoped_acquire gil;
    const py::object answer = (*held)(gradient);
    return answer.is_none() ? at::Tensor() : answer.cast<at::Tensor>();
  });
}

}  // namespace

void bind_parts(EngineBaseClass& engine) {
  engine
      .def("is_part",
           [](const EngineBase& engine, const at::Tensor& tensor) { return engine.passes().is_part(tensor); })
      .def("whole_sizes",
           [](const EngineBase& engine, const at::Tensor& tensor) { return engine.passes().whole_sizes(tensor); })
      .def(
          "count_exchanges", [](const EngineBase& engine, bool counts) { engine.passes().count_exchanges(counts); },
          py::arg("counts"))
      .def_static("forget_sequence", &forget_sequence)
      .def_static("tells_wholes", [](const at::Tensor& tensor) { return PartTensor::of(tensor) != nullptr; })
      .def_static("recorded_node",
                  [](const at::Tensor& part) {  // by which torch tells whether a pass will come there
                    const WithoutInterception as_local;
                    NodePtr node = part.grad_fn();
                    if (node == nullptr) node = torch::autograd::impl::gradient_edge(part).function;
                    return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
                  })
      .def_static("is_leaf", [](const at::Tensor& tensor) { return tensor.is_leaf(); })
      .def_static("run_backward", &run_backward, py::arg("roots"), py::arg("gradients"), py::arg("keep_graph"),
                  py::arg("create_graph"), py::arg("inputs"), py::arg("allow_unreachable"), py::arg("accumulate_grad"))
      .def_static("register_hook", &register_hook, py::arg("part"), py::arg("hook"))
      .def_static("remove_hook", [](const at::Tensor& part, unsigned place) { part.remove_hook(place); })
      .def_static(
          "random_state_of_parts",
          [](const at::Device& device) -> std::optional<at::Tensor> {
            const at::Tensor state = RandomStreams::current().state(RandomStream::kSlice, device);
            return state.defined() ? std::optional(state) : std::nullopt;
          },
          py::arg("device"))
      .def_static(
          "set_random_state_of_parts",
          [](const at::Device& device, const std::optional<at::Tensor>& state) {
            RandomStreams::current().set_state(RandomStream::kSlice, device, state.value_or(at::Tensor()));
          },
          py::arg("device"), py::arg("state"))
      .def("whole_of",
           [](const EngineBase& engine, const at::Tensor& part) -> std::optional<at::Tensor> {
             const at::Tensor whole = engine.sequence() != nullptr ? engine.sequence()->whole_of(part) : at::Tensor();
             return whole.defined() ? std::optional(whole) : std::nullopt;
           })
      .def("is_slice",
           [](const EngineBase& engine, const at::Tensor& tensor) {
             return engine.tensor() != nullptr && engine.tensor()->is_part(tensor);
           })
      .def(
          "gather_like",
          [](const EngineBase& engine, const at::Tensor& tensor, const at::Tensor& slice) {
            return engine.tensor()->gather_like(tensor, slice);
          },
          py::arg("tensor"), py::arg("slice"), py::call_guard<py::gil_scoped_release>())
      .def(
          "gather",
          [](const EngineBase& engine, const at::Tensor& tensor) {
            return engine.tensor() != nullptr ? engine.tensor()->gather(tensor) : tensor;
          },
          py::arg("tensor"), py::call_guard<py::gil_scoped_release>())
      .def("cut", &cut, py::arg("input_ids"), py::arg("labels"), py::arg("position_ids"), py::arg("attention_mask"),
           py::arg("dim"));
}

}  // namespace trireme::python
