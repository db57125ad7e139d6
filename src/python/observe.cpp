// The log of collectives, as Python configures and reads it.
#include "trireme/observe/observation.h"

#include <pybind11/stl.h>

#include <chrono>
#include <string>
#include <tuple>
#include <vector>

#include "python/bindings.h"

namespace trireme::python {

namespace {

using EntryRow = std::tuple<std::string, int64_t, int, int64_t, double, double, double, double>;

std::vector<EntryRow> rows_of(int rank) {
  std::vector<EntryRow> rows;
  if (const auto log = comms_log_of(rank))
    for (const CommsLogEntry& entry : log->entries())
      rows.emplace_back(entry.operation, entry.bytes, entry.group_size, entry.count, entry.seconds, entry.min_seconds,
                        entry.algorithm_gbps(), entry.bus_gbps());
  return rows;
}

}  // namespace

void bind_observe(py::module_& module) {
  module.def(
      "configure_comms_log",
      [](int rank, bool enabled, bool verbose, bool prof_all, bool debug, std::vector<std::string> prof_ops) {
        configure_comms_log(rank, {.enabled = enabled,
                                   .verbose = verbose,
                                   .prof_all = prof_all,
                                   .debug = debug,
                                   .prof_ops = std::move(prof_ops)});
      },
      py::arg("rank"), py::kw_only(), py::arg("enabled"), py::arg("verbose"), py::arg("prof_all"), py::arg("debug"),
      py::arg("prof_ops"), WithoutGil(),
      "Switches the log of this rank's collectives on or off; what it has counted stays.");
  module.def("comms_log_rows", &rows_of, py::arg("rank"), WithoutGil(),
             "(operation, bytes, ranks, calls, seconds, least seconds, 10^9 bits/s, of the bus) of each size.");
  module.def(
      "comms_log_table", [](int rank) { return comms_log_of(rank) ? comms_log_of(rank)->table() : std::string(); },
      py::arg("rank"), WithoutGil(), "The same as text; empty: the log was never on.");
  module.def(
      "clear_comms_log", [](int rank) { return comms_log_of(rank) ? comms_log_of(rank)->clear() : void(); },
      py::arg("rank"), WithoutGil(), "Forgets what the log has counted.");
  module.def("has_listeners", &has_listeners, "Whether anybody hears what ranks do.");
  module.def(
      "tell_collective",
      [](int rank, const std::pair<std::string, std::string>& names, int64_t bytes, int group_size, double seconds) {
        const auto end = Notice::Clock::now();
        const auto took = std::chrono::duration_cast<Notice::Clock::duration>(std::chrono::duration<double>(seconds));
        tell({.kind = Notice::Kind::kCollective,
              .name = names.second,
              .operation = names.first,
              .group = "torch.distributed",
              .group_size = group_size,
              .bytes = bytes,
              .rank = rank,
              .begin = end - took,
              .end = end});
      },
      py::arg("rank"), py::arg("names"), py::arg("bytes"), py::arg("group_size"), py::arg("seconds"), WithoutGil(),
      "Tells of a call that ended now, which no group of the library's made. names: the operation, and what the "
      "program calls it.");
}

}  // namespace trireme::python
