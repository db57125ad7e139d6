#include "python/engine_getters.h"

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "trireme/observe/observation.h"

namespace trireme::python {
namespace {

/// The form in which façades have a getter: DeepSpeed's.
enum class Facade { kProperty, kMethod, kNone };

/// A value that every engine tells without arguments.
template <class Read>
struct Getter {
  const char* name;
  Facade facade;
  Read read;
  const char* doc;
};

constexpr std::tuple kGetters{
    Getter{"loss_scale", Facade::kProperty, &EngineBase::loss_scale, "The factor by which losses are multiplied now."},
    Getter{"is_gradient_accumulation_boundary", Facade::kMethod, &EngineBase::is_gradient_accumulation_boundary,
           "Whether the next step() ends the window."},
    Getter{"was_step_applied", Facade::kMethod, &EngineBase::was_step_applied, "The last step() changed the weights."},
    Getter{"get_global_grad_norm", Facade::kMethod, &EngineBase::get_global_grad_norm,
           "L2, before clipping, of the last step; -1 if it was not finite; None before the first one."},
    Getter{"global_steps", Facade::kProperty, &EngineBase::global_steps,
           "Calls of step() that ended a window; skipped ones included."},
    Getter{"micro_steps", Facade::kProperty, &EngineBase::micro_steps, "Calls of step()."},
    Getter{"skipped_steps", Facade::kProperty, &EngineBase::skipped_steps,
           "Steps without an update, because a gradient was not finite."},
    Getter{"global_samples", Facade::kProperty, &EngineBase::global_samples, "Samples of all steps over all ranks."},
    Getter{"train_batch_size", Facade::kMethod, &EngineBase::train_batch_size, "Samples of a step over all ranks."},
    Getter{"train_micro_batch_size_per_gpu", Facade::kMethod, &EngineBase::train_micro_batch_size_per_gpu,
           "Samples of a forward on one rank."},
    Getter{"gradient_accumulation_steps", Facade::kMethod, &EngineBase::gradient_accumulation_steps,
           "Micro-batches of a step on one rank."},
    Getter{"data_rank", Facade::kNone, [](const EngineBase& self) { return self.data_place().rank; },
           "Which part of a data set this rank reads."},
    Getter{"data_size", Facade::kNone, [](const EngineBase& self) { return self.data_place().size; },
           "Ranks, or groups of ranks, that take different samples."},
    Getter{"copies_of_gradients", Facade::kNone, &EngineBase::copies_of_gradients,
           "Ranks that have each element of the reduced gradients."},
    Getter{"group_count", Facade::kNone, &EngineBase::group_count, "Parameter groups; 0 without an optimizer."},
    Getter{"gradient_count", Facade::kNone,
           [](const EngineBase& self) { return self.pager().gradients_so_far().count; },
           "Gradients that this rank's parameters got since the window opened."},
    Getter{"device", Facade::kNone, [](const EngineBase& self) { return self.pager().device(); },
           "Where the parameters are."},
    Getter{"leaf_modules", Facade::kNone, [](const EngineBase& self) { return self.pager().policy().units.leaves; },
           "Names of the modules that are gathered as one."},
    Getter{"optimizer_bytes", Facade::kNone, &EngineBase::optimizer_bytes,
           "Bytes of masters and optimizer states on this rank."},
    Getter{"has_slices", Facade::kNone, [](const EngineBase& self) { return self.tensor() != nullptr; },
           "Whether ranks have slices of its layers."},
    Getter{"exchange_rows", Facade::kNone,
           [](const EngineBase& self) {
             std::vector<std::tuple<std::string, std::string, std::string, int64_t, int64_t>> rows;
             for (const ExchangeRow& row : self.passes().exchanges())
               rows.emplace_back(row.axis, row.what, word_of(row.way), row.exchanges, row.bytes_sent);
             return rows;
           },
           "Of what count_exchanges() counts: axis, operator, way, exchanges, bytes sent."},
    Getter{"exchange_table", Facade::kMethod, [](const EngineBase& self) { return text_of(self.passes().exchanges()); },
           "exchanges() as a table."},
    Getter{"step_times", Facade::kNone,
           [](const EngineBase& self) {
             using Times = std::tuple<int64_t, double, double, double, double, double>;
             const Observation* observation = self.observation();
             const auto times = observation != nullptr ? observation->step_times() : std::nullopt;
             if (!times) return std::optional<Times>();
             return std::optional(Times(times->step, times->forward_ms, times->backward_ms, times->backward_inner_ms(),
                                        times->backward_reduce_ms, times->step_ms));
           },
           "With wall_clock_breakdown: step, and ms of forward, backward, its inner part, its reductions, step()."},
    Getter{"failure", Facade::kNone, &EngineBase::failure, "The error that ended the engine; empty: nothing did."},
};

}  // namespace

void bind_getters(py::module_& module, EngineBaseClass& engine) {
  py::list of_facades, of_core;
  const auto bind = [&](const auto& getter) {
    if (getter.facade == Facade::kMethod)
      engine.def(getter.name, getter.read, getter.doc);
    else
      engine.def_property_readonly(getter.name, getter.read, getter.doc);
    if (getter.facade == Facade::kNone)
      of_core.append(getter.name);
    else
      of_facades.append(py::make_tuple(getter.name, getter.facade == Facade::kMethod, getter.doc));
  };
  std::apply([&](const auto&... getter) { (bind(getter), ...); }, kGetters);
  module.attr("ENGINE_GETTERS") = py::tuple(of_facades);
  module.attr("CORE_GETTERS") = py::tuple(of_core);
}

}  // namespace trireme::python
