#include "python/world.h"

#include "trireme/base/error.h"

namespace trireme::python {

Group& group_of(const WorldHandle& handle) {
  if (!handle.world.group) throw StateError("this world was closed; call trireme.init_distributed() again");
  return *handle.world.group;
}

namespace {

InitOptions init_options(std::optional<double> timeout_s) {
  InitOptions options;
  if (timeout_s) options.timeout = std::chrono::milliseconds(static_cast<int64_t>(*timeout_s * 1000));
  return options;
}

ReduceOp reduce_op(const std::string& name) {
  if (name == "sum") return ReduceOp::kSum;
  if (name == "mean") return ReduceOp::kMean;
  if (name == "max") return ReduceOp::kMax;
  if (name == "min") return ReduceOp::kMin;
  throw ConfigError("all_reduce: '" + name + "' is no operation; use sum, mean, max or min");
}

}  // namespace

void bind_world(py::module_& module) {
  py::class_<WorldHandle, std::shared_ptr<WorldHandle>>(module, "World", "The ranks of this job. Made by init().")
      .def_property_readonly("rank", [](const WorldHandle& self) { return self.world.rank; })
      .def_property_readonly("size", [](const WorldHandle& self) { return self.world.size; })
      .def_property_readonly("local_rank", [](const WorldHandle& self) { return self.world.local_rank; })
      .def_property_readonly("local_size", [](const WorldHandle& self) { return self.world.local_size; })
      .def_property_readonly("shares_memory", [](const WorldHandle& self) { return group_of(self).shares_memory(); })
      .def(
          "barrier", [](const WorldHandle& self) { group_of(self).barrier(); }, WithoutGil())
      .def(
          "all_reduce",
          [](const WorldHandle& self, const at::Tensor& tensor, const std::string& op) {
            group_of(self).all_reduce(tensor, reduce_op(op)).wait();
          },
          py::arg("tensor"), py::arg("op") = "sum", WithoutGil(), "In place; contiguous.")
      .def(
          "broadcast",
          [](const WorldHandle& self, const at::Tensor& tensor, int root) {
            group_of(self).broadcast(tensor, root).wait();
          },
          py::arg("tensor"), py::arg("root") = 0, WithoutGil(), "In place; contiguous.")
      .def(
          "abort", [](const WorldHandle& self, const std::string& reason) { group_of(self).abort(reason); },
          py::arg("reason"), WithoutGil(), "Peers' next waits raise PeerLostError with this reason.")
      .def("flight_record", [](const WorldHandle& self) { return group_of(self).flight_record(); })
      .def(
          "close", [](WorldHandle& self) { self.world.group.reset(); }, WithoutGil());
  module.def(
      "init",
      [](std::optional<double> timeout_s) {
        return std::make_shared<WorldHandle>(WorldHandle{init(init_options(timeout_s))});
      },
      py::arg("timeout_s") = py::none(), WithoutGil(),
      "trireme::init: joins the ranks that the launcher's variables name.");
}

}  // namespace trireme::python
