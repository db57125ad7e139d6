// Schedules of pipeline parallelism and partitions of layers, as values.
#include <tuple>

#include "python/bindings.h"
#include "trireme/pipeline/layer_profile.h"
#include "trireme/schedule/check.h"
#include "trireme/schedule/ordered_partition.h"
#include "trireme/schedule/partition.h"
#include "trireme/schedule/schedule.h"
#include "trireme/schedule/simulate.h"
#include "trireme/schedule/tree_partition.h"

namespace trireme::python {
namespace {

// (name, buffer): an instruction as DeepSpeed's are.
using NamedStreams = std::vector<std::vector<std::vector<std::pair<std::string, int>>>>;

pipeline::Schedule from_buffers(std::string name, int micro_batches, const NamedStreams& streams,
                                const std::vector<int>& buffers) {
  pipeline::Schedule schedule{.name = std::move(name),
                              .stages = static_cast<int>(streams.size()),
                              .micro_batches = micro_batches,
                              .streams = {},
                              .buffers = {}};
  for (const int of_stage : buffers) schedule.buffers.push_back({of_stage});
  for (const auto& stream : streams) {
    auto& steps = schedule.streams.emplace_back();
    for (const auto& instructions : stream) {
      pipeline::Step& step = steps.emplace_back();
      for (const auto& [kind, buffer] : instructions)
        step.push_back({.kind = pipeline::kind_of(kind), .buffer = buffer});
    }
  }
  return pipeline::follow_buffers(std::move(schedule));
}

using NamedComputations = std::vector<std::vector<std::tuple<std::string, int, int>>>;

pipeline::Schedule assembled(std::string name, int micro_batches, int chunks, bool in_v,
                             const NamedComputations& computations) {
  std::vector<std::vector<pipeline::Computation>> lists;
  for (const auto& named : computations) {
    auto& list = lists.emplace_back();
    for (const auto& [kind, chunk, micro_batch] : named) list.push_back({pipeline::kind_of(kind), chunk, micro_batch});
  }
  return pipeline::assemble(std::move(name), static_cast<int>(computations.size()), micro_batches, chunks,
                            in_v ? pipeline::PartOrder::kV : pipeline::PartOrder::kLoop, lists);
}

void bind_instruction(py::module_& module) {
  py::class_<pipeline::Instruction>(module, "PipelineInstruction", "trireme::pipeline::Instruction.")
      .def_property_readonly("name", [](const pipeline::Instruction& self) { return name_of(self.kind); })
      .def_readonly("chunk", &pipeline::Instruction::chunk)
      .def_readonly("micro_batch", &pipeline::Instruction::micro_batch)
      .def_readonly("buffer", &pipeline::Instruction::buffer)
      .def_readonly("peer", &pipeline::Instruction::peer)
      .def("__eq__",
           [](const pipeline::Instruction& self, const pipeline::Instruction& other) { return self == other; })
      .def("__repr__", [](const pipeline::Instruction& self) { return to_text(self); });
}

void bind_timeline(py::module_& module) {
  py::class_<pipeline::Timeline>(module, "PipelineTimeline", "trireme::pipeline::Timeline.")
      .def_property_readonly("slots",
                             [](const pipeline::Timeline& self) {
                               std::vector<std::vector<std::tuple<pipeline::Instruction, double, double>>> stages;
                               for (const auto& slots : self.slots) {
                                 auto& stage = stages.emplace_back();
                                 for (const pipeline::Slot& slot : slots)
                                   stage.emplace_back(slot.instruction, slot.begin, slot.end);
                               }
                               return stages;
                             })
      .def_readonly("makespan", &pipeline::Timeline::makespan)
      .def_readonly("bubble_share", &pipeline::Timeline::bubble_share)
      .def_readonly("peak_activations", &pipeline::Timeline::peak_activations)
      .def(
          "text", [](const pipeline::Timeline& self, double unit) { return to_text(self, unit); }, py::arg("unit") = 1)
      .def(
          "svg", [](const pipeline::Timeline& self, const std::string& title) { return to_svg(self, title); },
          py::arg("title") = "");
}

void bind_partitions(py::module_& module) {
  module.def("partition_uniform", &pipeline::partition_uniform, py::arg("layers"), py::arg("stages"));
  module.def("partition_balanced", &pipeline::partition_balanced, py::arg("weights"), py::arg("stages"));
  module.def("partition_by_type", &pipeline::partition_by_type, py::arg("classes"), py::arg("regex"),
             py::arg("stages"));
  module.def(
      "partition_profiled",
      [](const std::vector<std::tuple<double, int64_t, int64_t>>& profiles, int stages, int chunks,
         int64_t memory_limit) {
        std::vector<LayerProfile> layers;
        for (const auto& [seconds, parameter_bytes, activation_bytes] : profiles)
          layers.push_back({seconds, parameter_bytes, activation_bytes});
        PipelineModuleOptions options;
        options.stages = stages;
        options.chunks = chunks;
        options.memory_limit = memory_limit;
        return partition_profiled(layers, options);
      },
      py::arg("profiles"), py::arg("stages"), py::arg("chunks"), py::arg("memory_limit"));
  module.def(
      "ordered_partition",
      [](const std::vector<std::tuple<std::string, int64_t, int64_t, int64_t>>& atoms, int stages,
         int64_t limit_bytes) {
        std::vector<pipeline::Atom> list;
        for (const auto& [name, cost, bytes, crossing_bytes] : atoms)
          list.push_back({name, cost, bytes, crossing_bytes});
        return pipeline::ordered_partition(list, stages, limit_bytes);
      },
      py::arg("atoms"), py::arg("stages"), py::arg("limit_bytes"));
  module.def(
      "tree_partition",
      [](const std::vector<std::pair<int, int64_t>>& modules, int stages) {
        std::vector<pipeline::TreeModule> list;
        for (const auto& [parent, own_cost] : modules) list.push_back({parent, own_cost});
        return pipeline::tree_partition(list, stages);
      },
      py::arg("modules"), py::arg("stages"));
}

}  // namespace

void bind_pipeline(py::module_& module) {
  bind_instruction(module);
  bind_timeline(module);
  bind_partitions(module);
  py::class_<pipeline::Schedule>(module, "PipelineSchedule", "trireme::pipeline::Schedule.")
      .def_readonly("name", &pipeline::Schedule::name)
      .def_readonly("stages", &pipeline::Schedule::stages)
      .def_readonly("micro_batches", &pipeline::Schedule::micro_batches)
      .def_readonly("chunks", &pipeline::Schedule::chunks)
      .def_readonly("streams", &pipeline::Schedule::streams)
      .def_readonly("buffers", &pipeline::Schedule::buffers)
      .def("part_of", &pipeline::Schedule::part_of, py::arg("stage"), py::arg("chunk"))
      .def("stage_of", &pipeline::Schedule::stage_of, py::arg("part"))
      .def(
          "check",
          [](const pipeline::Schedule& self, bool barriers) {
            check(self, barriers ? pipeline::Waits::kBarriers : pipeline::Waits::kReceives);
          },
          py::arg("barriers") = false)
      .def(
          "simulate",
          [](const pipeline::Schedule& self, double forward, double backward_input, double backward_weight,
             double message, const std::vector<double>& of_part) {
            return simulate(self, {forward, backward_input, backward_weight, message, of_part});
          },
          py::arg("forward") = 1, py::arg("backward_input") = 1, py::arg("backward_weight") = 1, py::arg("message") = 0,
          py::arg("of_part") = std::vector<double>());
  module.def(
      "visits_schedule",
      [](const std::vector<int>& stages, int micro_batches, int active, const std::vector<double>& times) {
        return pipeline::visits_schedule(stages, {.micro_batches = micro_batches, .active = active, .times = times});
      },
      py::arg("stages"), py::arg("micro_batches"), py::arg("active"), py::arg("times") = std::vector<double>());
  module.def("schedule_names", &pipeline::schedule_names);
  module.def("make_schedule", &pipeline::make_schedule, py::arg("name"), py::arg("stages"), py::arg("micro_batches"),
             py::arg("chunks") = 1);
  module.def("data_parallel_schedule", &pipeline::data_parallel, py::arg("micro_batches"));
  module.def("assemble_schedule", &assembled, py::arg("name"), py::arg("micro_batches"), py::arg("chunks"),
             py::arg("in_v"), py::arg("computations"));
  module.def("schedule_from_buffers", &from_buffers, py::arg("name"), py::arg("micro_batches"), py::arg("streams"),
             py::arg("buffers"));
}

}  // namespace trireme::python
