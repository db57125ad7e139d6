// The engine of a stage that owns parts of an unmodified Python module.
#include <torch/csrc/autograd/python_variable.h>

#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "python/engine.h"
#include "python/hyperparameters.h"
#include "python/module_mirror.h"
#include "trireme/base/error.h"
#include "trireme/pipeline/step_engine.h"

namespace trireme::python {
namespace {

/// A StepEngine over a Python module.
class OwnedEngine final : private KeptModule, public StepEngine {
 public:
  OwnedEngine(std::shared_ptr<WorldHandle> world, std::shared_ptr<torch::nn::Module> mirror, const Topology& topology,
              const StageOf& stage_of, const StepRunnerOptions& step, const InitializeOptions& options)
      : KeptModule{std::move(world), std::move(mirror)},
        StepEngine(group_of(*KeptModule::world), topology, *KeptModule::mirror, stage_of, step, options) {}
  OwnedEngine(std::shared_ptr<WorldHandle> world, std::shared_ptr<torch::nn::Module> mirror, OwnedEngine& beside,
              const StageOf& stage_of, const InitializeOptions& options)
      : KeptModule{std::move(world), std::move(mirror)}, StepEngine(beside, *KeptModule::mirror, stage_of, options) {}

  bool is_forked() const { return world->is_forked(); }
};

std::shared_ptr<OwnedEngine> make_owned_engine(const std::shared_ptr<WorldHandle>& world, const Topology& topology,
                                               const py::object& module, const std::map<std::string, int>& homes,
                                               const Config& config, const std::vector<py::dict>& groups,
                                               const py::object& make_client, const std::string& output,
                                               const std::string& pipeline, int active_micro_batches,
                                               const py::object& facts, const std::shared_ptr<OwnedEngine>& beside) {
  InitializeOptions options = options_of(module, config, groups, make_client, output, facts);
  options.present_buffers = {};  // those of this stage, which the mirror has
  const auto mirror = mirror_of(module);
  const StageOf stage_of = [&homes](const std::string& name) {
    const auto found = homes.find(name);
    if (found == homes.end()) throw ConfigError(str("smp: '", name, "' has no stage"));
    return found->second;
  };
  const StepRunnerOptions step{.pipeline = pipeline, .active_micro_batches = active_micro_batches};
  return share_engine([&] {
    return beside ? new OwnedEngine(world, mirror, *beside, stage_of, options)
                  : new OwnedEngine(world, mirror, topology, stage_of, step, options);
  });
}

/// Runs `program` for each micro-batch. What it raised is raised as it was; the other stages get its text.
StepRunner::Outputs step(OwnedEngine& self, int micro_batches, const py::function& program, const std::string& name) {
  std::exception_ptr raised;
  const auto run = [&](int micro_batch) {
    const py::gil_scoped_acquire gil;
    try {
      const py::object results = program(micro_batch);
      StepRunner::stay_if_left();
      return results.cast<std::vector<at::Tensor>>();
    } catch (const py::error_already_set&) {
      StepRunner::stay_if_left();
      if (!raised && !StepRunner::is_given_up()) raised = std::current_exception();
      throw;
    }
  };
  const py::gil_scoped_release no_gil;
  try {
    return self.step(micro_batches, run, name);
  } catch (...) {
    if (self.has_left_program()) {
      const py::gil_scoped_acquire gil;
      (void)py::cast(&self).release();  // for ever: a thread of the program uses it
    }
    if (raised) std::rethrow_exception(raised);
    throw;
  }
}

std::optional<bool> update(OwnedEngine& self, const GroupChanges& changes) {
  set_hyperparameters(self, changes);
  const py::gil_scoped_release no_gil;
  self.update();
  return self.was_step_applied_if_known();
}

void set_optimizer(OwnedEngine& self, const Config& config, const std::vector<py::dict>& groups,
                   const py::object& make_client) {
  OptimizerChoice choice = optimizer_choice(config, groups, make_client);
  choice.loss_scale = {.options = config.precision.loss_scale, .rule = LossScaleRule::kHysteresisAndClamp};
  const py::gil_scoped_release no_gil;
  self.set_optimizer(choice);
}

/// (scale, steps, last overflow, hysteresis) of the loss scale; nothing: there is none.
std::optional<std::tuple<double, int64_t, int64_t, int64_t>> loss_scaler(OwnedEngine& self) {
  const std::optional<LossScaler::State> state = self.loss_scaler();
  if (!state) return std::nullopt;
  return std::tuple(state->scale, state->steps, state->last_overflow, state->hysteresis);
}

/// A part of a step function that runs again, as torch.utils.checkpoint's functions do: begun when it is made.
class StepRegion {
 public:
  explicit StepRegion(std::shared_ptr<OwnedEngine> engine)
      : engine_(std::move(engine)), region_(engine_->ownership->begin_region()) {}
  StepRegion(const StepRegion&) = delete;
  StepRegion& operator=(const StepRegion&) = delete;
  void end() noexcept { Ownership::end_region(*region_); }
  void enter() { replays_.push_back(std::make_unique<Ownership::Replay>(*engine_->ownership, region_)); }
  void exit() { replays_.pop_back(); }

 private:
  const std::shared_ptr<OwnedEngine> engine_;
  const std::shared_ptr<Ownership::Region> region_;
  std::vector<std::unique_ptr<Ownership::Replay>> replays_;
};

/// None: the module runs, and no call of end_call() follows; True: one does; else (number, results) of an earlier call.
py::object begin_call(OwnedEngine& self, int64_t key, int stage, const std::vector<at::Tensor>& inputs) {
  Ownership::ModuleCalls::Begun call = self.ownership->calls().begin(static_cast<uint64_t>(key), stage, inputs);
  if (call.is_open) return py::bool_(true);
  if (call.seen < 0) return py::none();
  return py::make_tuple(call.seen, std::move(call.results));
}

std::map<std::string, int64_t> counters(const OwnedEngine& self) {
  const OwnershipCounters counters = self.counters();
  return {{"own", counters.own},           {"remote", counters.remote}, {"replicated", counters.replicated},
          {"messages", counters.messages}, {"bytes", counters.bytes},   {"told", counters.told},
          {"spared", counters.spared}};
}

}  // namespace

void bind_step_engine(py::module_& module) {
  py::class_<StepRegion>(module, "StepRegion",
                         "A part of a step function, from begin_region() to end(), and its second runs: as a context.")
      .def("end", &StepRegion::end)
      .def("__enter__", &StepRegion::enter)
      .def("__exit__", [](StepRegion& self, const py::args&) { self.exit(); });
  py::class_<OwnedEngine, EngineBase, std::shared_ptr<OwnedEngine>>(
      module, "StepEngine", py::multiple_inheritance(),
      "trireme::StepEngine of the stage that owns these tensors of a Python module here.")
      .def(py::init(&make_owned_engine), py::arg("world"), py::arg("topology"), py::arg("module"), py::arg("homes"),
           py::arg("config"), py::arg("groups"), py::arg("make_client"), py::arg("output"), py::arg("pipeline"),
           py::arg("active_micro_batches"), py::arg("facts") = py::none(), py::arg("beside") = py::none())
      .def("step", &step, py::arg("micro_batches"), py::arg("program"), py::arg("name"))
      .def(
          "backward",
          [](OwnedEngine& self, const at::Tensor& root, const std::optional<at::Tensor>& gradient) {
            self.backward(root, gradient.value_or(at::Tensor()));
          },
          py::arg("root"), py::arg("gradient") = py::none(), WithoutGil())
      .def(
          "move", [](OwnedEngine& self, const at::Tensor& tensor, int stage) { return self.move(tensor, stage); },
          py::arg("tensor"), py::arg("stage"), WithoutGil())
      .def(
          "changes_state", [](OwnedEngine& self, const std::string& what) { self.ownership->changes_state(what); },
          py::arg("what"))
      .def("end_autocast", [](OwnedEngine& self) { self.ownership->end_autocast(); })
      .def(
          "numbers_of", [](OwnedEngine& self, const at::Tensor& tensor) { return self.numbers_of(tensor); },
          py::arg("tensor"), WithoutGil())
      .def(
          "enter", [](OwnedEngine& self, int stage) { self.ownership->enter(stage); }, py::arg("stage"))
      .def("leave", [](OwnedEngine& self) { self.ownership->leave(); })
      .def("begin_call", &begin_call, py::arg("key"), py::arg("stage"), py::arg("inputs"))
      .def(
          "end_call",
          [](OwnedEngine& self, const std::vector<at::Tensor>& results) {
            return self.ownership->calls().end(results);
          },
          py::arg("results"))
      .def("drop_call", [](OwnedEngine& self) { self.ownership->calls().drop(); })
      .def("begin_region", [](const std::shared_ptr<OwnedEngine>& self) { return std::make_unique<StepRegion>(self); })
      .def("update", &update, py::arg("changes"))
      .def("set_optimizer", &set_optimizer, py::arg("config"), py::arg("groups"), py::arg("make_client"))
      .def(
          "divide_gradients_by",
          [](OwnedEngine& self, std::optional<int64_t> divisor) { self.divide_gradients_by(divisor); },
          py::arg("divisor"))
      .def("loss_scaler", &loss_scaler)
      .def(
          "set_loss_scaler",
          [](OwnedEngine& self, const std::tuple<double, int64_t, int64_t, int64_t>& values) {
            const auto [scale, steps, last_overflow, hysteresis] = values;
            self.set_loss_scaler(
                {.scale = scale, .steps = steps, .last_overflow = last_overflow, .hysteresis = hysteresis});
          },
          py::arg("values"))
      .def("leave_steps", [](OwnedEngine& self) { self.leave_steps(); })
      .def(
          "destroy", [](OwnedEngine& self) { self.destroy(); }, WithoutGil())
      .def("keep_buffers_apart", [](OwnedEngine& self) { self.keep_buffers_apart(); })
      .def("home_of",
           [](const OwnedEngine& self, const at::Tensor& tensor) -> std::optional<int> {
             const auto home = self.home_of(tensor);
             return home ? std::optional(home->stage) : std::nullopt;
           })
      .def("counters", &counters)
      .def_property_readonly("stage", [](const OwnedEngine& self) { return self.stage(); })
      .def_property_readonly("stages", [](const OwnedEngine& self) { return self.stages(); })
      .def_property_readonly("pipeline", [](OwnedEngine& self) { return self.runner().pipeline(); });
}

}  // namespace trireme::python
