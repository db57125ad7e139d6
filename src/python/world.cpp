#include "python/world.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/device.h"

namespace trireme::python {

Group& group_of(const WorldHandle& handle) {
  if (!handle.world.group) throw StateError("this world was closed; call trireme.init_distributed() again");
  return *handle.world.group;
}

namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

/// Shares an object of torch.distributed's own binding, whatever it holds its objects by.
template <class T>
c10::intrusive_ptr<T> share(const py::handle& object) {
  if (object.is_none()) return {};
  return c10::intrusive_ptr<T>::unsafe_reclaim_from_nonowning(object.cast<T*>());
}

std::shared_ptr<WorldHandle> join_torch(const py::object& store, const py::object& process_group, int rank, int size,
                                        double timeout_s) {
  const auto meeting = share<c10d::Store>(store);
  const auto processes = share<c10d::ProcessGroup>(process_group);
  const py::gil_scoped_release no_gil;
  const JoinOptions options{.rank = rank, .size = size, .timeout = milliseconds(timeout_s)};
  return std::make_shared<WorldHandle>(join(meeting, processes, options));
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
      .def_property_readonly("shares_memory",
                             [](const WorldHandle& self) { return group_of(self).memory_sharing() != nullptr; })
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
          "gather",
          [](const WorldHandle& self, const std::string& text, const std::string& caller) {
            std::optional<CallerScope> scope;
            if (!caller.empty()) scope.emplace(caller.c_str());
            return gather_or_throw(group_of(self), [&] { return text; });
          },
          py::arg("text"), py::arg("caller") = "", WithoutGil(),
          "The texts of all ranks, by rank. caller: the call that every rank makes, for errors.")
      .def(
          "first_difference",
          [](const WorldHandle& self, const std::vector<int64_t>& values) -> std::optional<size_t> {
            const auto difference = first_difference(group_of(self), values);
            return difference ? std::optional(difference->index) : std::nullopt;
          },
          py::arg("values"), WithoutGil(),
          "Index of the first integer that ranks have otherwise; None: all have the same.")
      .def(
          "abort", [](const WorldHandle& self, const std::string& reason) { group_of(self).abort(reason); },
          py::arg("reason"), WithoutGil(), "Peers' next waits raise PeerLostError with this reason.")
      .def("flight_record", [](const WorldHandle& self) { return group_of(self).flight_record(); })
      .def(
          "close", [](WorldHandle& self) { self.world.group.reset(); }, WithoutGil());
  py::class_<AwaitedRanks, std::shared_ptr<AwaitedRanks>>(module, "AwaitedRanks", "Made by await_ranks().")
      .def_readonly("rank", &AwaitedRanks::rank)
      .def_readonly("size", &AwaitedRanks::size)
      .def_readonly("host", &AwaitedRanks::host)
      .def_readonly("port", &AwaitedRanks::port)
      .def_readonly("serves", &AwaitedRanks::serves)
      .def_readonly("path", &AwaitedRanks::path);
  module.def(
      "init",
      [](double timeout_s) { return std::make_shared<WorldHandle>(init({.timeout = milliseconds(timeout_s)})); },
      py::arg("timeout_s"), WithoutGil(), "trireme::init: joins the ranks that the launcher's variables name.");
  module.def(
      "await_ranks",
      [](double timeout_s, const std::map<std::string, std::string>& variables) {
        return std::make_shared<AwaitedRanks>(
            await_ranks({.timeout = milliseconds(timeout_s), .variables = variables}));
      },
      py::arg("timeout_s"), py::arg("variables"), WithoutGil(),
      "trireme::await_ranks: returns when all ranks that the launcher's variables name have come.");
  module.def("environment", &environment, py::arg("name"), "A variable that docs/environment.md lists.");
  module.def("choose_device", &choose_device, py::arg("name"), py::arg("local_rank"));
  module.def("join", &join_torch, py::arg("store"), py::arg("process_group"), py::arg("rank"), py::arg("size"),
             py::arg("timeout_s"), "trireme::join: joins the ranks that torch.distributed has started.");
}

}  // namespace trireme::python
