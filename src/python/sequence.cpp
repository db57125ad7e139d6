// Parts of samples and layers, of an engine over a Python module.
#include <torch/csrc/utils/pybind.h>

#include "python/engine.h"
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

}  // namespace

void bind_parts(EngineBaseClass& engine) {
  engine
      .def("is_part",
           [](const EngineBase& engine, const at::Tensor& tensor) { return engine.passes().is_part(tensor); })
      .def("whole_sizes",
           [](const EngineBase& engine, const at::Tensor& tensor) { return engine.passes().whole_sizes(tensor); })
      .def_static("forget_sequence", &forget_sequence)
      .def("speak_of_wholes", [](const EngineBase& engine) { engine.passes().speak_of_wholes(); })
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
