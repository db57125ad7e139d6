#include "python/engine.h"

#include <torch/csrc/utils/pybind.h>

#include <array>
#include <set>
#include <string>
#include <string_view>

#include "python/client_optimizer.h"
#include "python/engine_getters.h"
#include "python/hyperparameters.h"
#include "python/module_mirror.h"
#include "python/tensor.h"
#include "trireme/optim/fields.h"
#include "trireme/training/model_agreement.h"

namespace trireme::python {
namespace {

/// The value of a hyperparameter in a dict as {"lr": ..., "betas": (...), ...}; nothing: it is not there, or None.
template <class T>
std::optional<T> value_of(const py::dict& values, const Field& field) {
  if (!values.contains(field.name) || values[field.name].is_none()) return std::nullopt;
  if constexpr (std::is_same_v<T, double>)
    if (field.place >= 0) return values[field.name].cast<std::array<double, 2>>()[static_cast<size_t>(field.place)];
  return values[field.name].cast<T>();
}

/// {"names": [...], "lr": ..., "betas": (...), ...} as the parameters' part of a Python optimizer's group.
ParameterGroup parameter_group(const py::dict& group) {
  ParameterGroup result;
  result.names = group["names"].cast<std::vector<std::string>>();
  group_fields([&](const Field& field, auto, auto own) {
    result.*own = value_of<typename std::decay_t<decltype(result.*own)>::value_type>(group, field);
  });
  return result;
}

std::shared_ptr<ModuleEngine> make_engine(const std::shared_ptr<WorldHandle>& world, const py::object& module,
                                          const Config& config, const std::vector<py::dict>& groups,
                                          const py::object& make_client, const std::string& output,
                                          const py::object& facts, const std::set<std::string>& unmanaged) {
  InitializeOptions options = options_of(module, config, groups, make_client, output, facts);
  options.unmanaged = unmanaged;
  const auto mirror = mirror_with_layers(module);
  return share_engine([&] { return new ModuleEngine(world, mirror, options); });
}

py::dict as_dict(const OptimizerOptions& options) {
  py::dict result;
  group_fields([&](const Field& field, auto own, auto) {
    const bool has_it = field.is_of(options.kind);
    if (!has_it || (options.kind == OptimizerKind::kClient && field.name != std::string_view("lr"))) return;
    if (field.place < 0)
      result[field.name] = options.*own;
    else if (field.place == 0)
      result[field.name] = py::make_tuple(options.*own);
    else
      result[field.name] = py::object(result[field.name]) + py::make_tuple(options.*own);
  });
  return result;
}

/// The hyperparameters that a parameter group may have, and how each is held.
py::dict group_hyperparameters() {
  py::dict result;
  group_fields([&](const Field& field, auto own, auto) {
    const bool is_flag = std::is_same_v<std::decay_t<decltype(OptimizerOptions{}.*own)>, bool>;
    result[field.name] = is_flag ? "flag" : field.place < 0 ? "number" : "numbers";
  });
  return result;
}

/// Sets the optimizer of `config`, or the one that `make_client` makes. Collective.
void set_optimizer(ModuleEngine& engine, const Config& config, const std::vector<py::dict>& groups,
                   const py::object& make_client) {
  const OptimizerChoice choice = optimizer_choice(config, groups, make_client);
  const py::gil_scoped_release no_gil;
  engine.set_optimizer(choice);
}

/// A step with what the program has changed since the last one, by number of the group: (whether it ended a window,
/// whether the weights changed, None where a device has not told). The host waits for no device.
py::tuple step(ModuleEngine& engine, const GroupChanges& changes) {
  set_hyperparameters(engine, changes);
  StepReport report;
  {
    const py::gil_scoped_release no_gil;
    report = engine.step();
  }
  return py::make_tuple(report.ended_window, report.applied);
}

/// The engine's forward scope as a Python context manager.
class ForwardContext {
 public:
  explicit ForwardContext(std::shared_ptr<ModuleEngine> engine) : engine_(std::move(engine)) {}
  void enter() { scope_.reset(new ForwardScope(engine_->begin_forward())); }
  void exit() { scope_.reset(); }
  at::Tensor input(const at::Tensor& tensor) { return scope_->input(at::Tensor(tensor)); }
  void look_at(const at::Tensor& tensor) {
    scope_->look_at(tensor);
    engine_->events().see_input(tensor);
  }
  void explain(const std::string& problem, const std::vector<at::ScalarType>& inputs) const {
    scope_->explain(problem, inputs);
  }

 private:
  const std::shared_ptr<ModuleEngine> engine_;
  std::unique_ptr<ForwardScope> scope_;
};

/// The scopes of an Engine end with their objects, and none of them moves: Python holds them in optionals.
class NoSyncContext {
 public:
  explicit NoSyncContext(std::shared_ptr<ModuleEngine> engine) : engine_(std::move(engine)) {}
  void enter() { scope_.reset(new NoSync(engine_->no_sync())); }
  void exit() { scope_.reset(); }

 private:
  const std::shared_ptr<ModuleEngine> engine_;
  std::unique_ptr<NoSync> scope_;
};

class CoalescedContext {
 public:
  explicit CoalescedContext(std::shared_ptr<ModuleEngine> engine) : engine_(std::move(engine)) {}
  void enter() { scope_.reset(new CoalescedReduction(engine_->coalesce_grad_reduction())); }
  void exit(bool reduces) {
    if (reduces) scope_->close();
    scope_.reset();
  }

 private:
  const std::shared_ptr<ModuleEngine> engine_;
  std::unique_ptr<CoalescedReduction> scope_;
};

void bind_scopes(py::module_& module) {
  py::class_<ForwardContext>(module, "ForwardContext")
      .def("__enter__",
           [](ForwardContext& self) -> ForwardContext& {
             self.enter();
             return self;
           })
      .def("__exit__", [](ForwardContext& self, const py::args&) { self.exit(); })
      .def("input", &ForwardContext::input)
      .def("look_at", &ForwardContext::look_at)
      .def("explain", &ForwardContext::explain);
  py::class_<NoSyncContext>(module, "NoSyncContext")
      .def("__enter__", &NoSyncContext::enter)
      .def("__exit__", [](NoSyncContext& self, const py::args&) { self.exit(); });
  py::class_<CoalescedContext>(module, "CoalescedContext")
      .def("__enter__", &CoalescedContext::enter)
      .def("__exit__", [](CoalescedContext& self, const py::object& type, const py::object&, const py::object&) {
        const bool reduces = type.is_none();
        const py::gil_scoped_release no_gil;
        self.exit(reduces);
      });
}

using EngineClass = py::class_<ModuleEngine, EngineBase, std::shared_ptr<ModuleEngine>>;

/// Forward, backward and step, which the program calls itself.
void bind_passes(EngineClass& engine) {
  engine
      .def(
          "backward",
          [](ModuleEngine& self, const at::Tensor& loss, bool retain_graph, bool create_graph, bool scale_wrt_gas) {
            return self.backward(loss, {retain_graph, create_graph, scale_wrt_gas});
          },
          py::arg("loss"), py::arg("retain_graph") = false, py::arg("create_graph") = false,
          py::arg("scale_wrt_gas") = true, WithoutGil())
      .def("scale", &ModuleEngine::scale, WithoutGil())
      .def("step", &step, py::arg("changes"))
      .def("set_optimizer", &set_optimizer, py::arg("config"), py::arg("groups"), py::arg("make_client"))
      .def(
          "defer_reductions",
          [](ModuleEngine& self, bool on) {
            self.defer_reductions(on ? "set_requires_gradient_sync(False)" : nullptr);
          },
          py::arg("on"), WithoutGil())
      .def("set_gradient_accumulation_boundary", &ModuleEngine::set_gradient_accumulation_boundary)
      .def("forward_scope", [](std::shared_ptr<ModuleEngine> self) { return ForwardContext(std::move(self)); })
      .def("no_sync", [](std::shared_ptr<ModuleEngine> self) { return NoSyncContext(std::move(self)); })
      .def("coalesce_grad_reduction",
           [](std::shared_ptr<ModuleEngine> self) { return CoalescedContext(std::move(self)); });
}

void bind_states(EngineBaseClass& engine) {
  engine.def("step_without_gradients", &EngineBase::step_without_gradients, WithoutGil())
      .def("zero_grad", &EngineBase::zero_grad, WithoutGil())
      .def(
          "reduce_gradients", [](EngineBase& self) { self.pager().reduce_now(); }, WithoutGil())
      .def("empty_partition_cache", &EngineBase::empty_partition_cache, WithoutGil())
      .def("destroy", &EngineBase::destroy, WithoutGil())
      .def(
          "offload_states",
          [](EngineBase& self, std::vector<std::string> include, std::string device) {
            self.offload_states({std::move(include), std::move(device)});
          },
          py::arg("include"), py::arg("device"), WithoutGil())
      .def("reload_states", &EngineBase::reload_states, WithoutGil());
}

void bind_numbers(EngineBaseClass& engine) {
  engine.def("get_lr", &EngineBase::get_lr, py::arg("group") = 0)
      .def("get_mom", &EngineBase::get_mom, py::arg("group") = 0)
      .def("hyperparameters", [](const EngineBase& self, size_t group) { return as_dict(self.hyperparameters(group)); })
      .def("known_hyperparameters",
           [](const EngineBase& self, size_t group) { return as_dict(self.known_hyperparameters(group)); })
      .def("set_hyperparameters",
           [](EngineBase& self, size_t group, const py::dict& values) { set_hyperparameters(self, group, values); })
      .def("set_train_batch_size", &EngineBase::set_train_batch_size)
      .def("set_train_micro_batch_size", &EngineBase::set_train_micro_batch_size);
}

void bind_files(EngineBaseClass& engine) {
  engine
      .def(
          "save_checkpoint",
          [](EngineBase& self, const std::string& directory, const std::string& tag, const std::string& client_state,
             bool exclude_frozen_parameters, bool save_latest) {
            const SaveCheckpointOptions options{.tag = tag,
                                                .client_state = client_state,
                                                .exclude_frozen_parameters = exclude_frozen_parameters,
                                                .latest = save_latest ? UpdateLatest::kYes : UpdateLatest::kNo};
            (void)self.save_checkpoint(directory, options);
          },
          py::arg("directory"), py::arg("tag"), py::arg("client_state"), py::arg("exclude_frozen_parameters"),
          py::arg("save_latest"), WithoutGil())
      .def(
          "wait_for_checkpoint", [](EngineBase& self) { (void)self.wait_for_checkpoint(); }, WithoutGil())
      .def(
          "load_checkpoint",
          [](EngineBase& self, const std::string& directory, const std::string& tag, bool module, bool module_strict,
             bool optimizer_states, bool lr_scheduler_states, bool module_only) {
            std::optional<std::pair<std::string, std::string>> result;
            const auto loaded = self.load_checkpoint(directory, {.tag = tag,
                                                                 .load_module = module,
                                                                 .load_module_strict = module_strict,
                                                                 .load_optimizer_states = optimizer_states,
                                                                 .load_lr_scheduler_states = lr_scheduler_states,
                                                                 .load_module_only = module_only});
            if (loaded) result.emplace(loaded->tag, loaded->client_state);
            return result;
          },
          py::arg("directory"), py::arg("tag"), py::arg("module"), py::arg("module_strict"),
          py::arg("optimizer_states"), py::arg("lr_scheduler_states"), py::arg("module_only"), WithoutGil(),
          "(tag, client state as JSON text), or None.")
      .def(
          "save_16bit_model",
          [](EngineBase& self, const std::string& directory, const std::string& name, bool exclude_frozen) {
            return self.save_16bit_model(directory, {.name = name, .exclude_frozen_parameters = exclude_frozen});
          },
          py::arg("directory"), py::arg("name"), py::arg("exclude_frozen_parameters"), WithoutGil());
}

void check_models(const WorldHandle& world, const py::object& module, const Config& config,
                  const std::set<std::string>& unmanaged) {
  const auto mirror = mirror_of(module);
  Group& group = group_of(world);
  const py::gil_scoped_release no_gil;
  check_same_model(group, *mirror, config.precision, unmanaged);
}

}  // namespace

void set_hyperparameters(EngineBase& engine, size_t group, const py::dict& values) {
  OptimizerOptions options = engine.known_hyperparameters(group);
  group_fields([&](const Field& field, auto own, auto) {
    using Value = std::decay_t<decltype(options.*own)>;
    options.*own = value_of<Value>(values, field).value_or(options.*own);
  });
  engine.set_hyperparameters(options, group);
}

void set_hyperparameters(EngineBase& engine, const GroupChanges& changes) {
  for (const auto& [group, values] : changes) set_hyperparameters(engine, group, values);
}

OptimizerChoice optimizer_choice(const Config& config, const std::vector<py::dict>& groups,
                                 const py::object& make_client) {
  OptimizerChoice choice{.optimizer = config.optimizer};
  for (const py::dict& group : groups) choice.parameter_groups.push_back(parameter_group(group));
  if (!make_client.is_none()) choice.client = client_optimizer_factory(make_client);
  return choice;
}

InitializeOptions options_of(const py::object& module, const Config& config, const std::vector<py::dict>& groups,
                             const py::object& make_client, const std::string& output, const py::object& facts) {
  InitializeOptions options;
  options.config = config;
  for (const py::dict& group : groups) options.parameter_groups.push_back(parameter_group(group));
  if (!make_client.is_none()) options.client_optimizer = client_optimizer_factory(make_client);
  options.output = output;
  options.has_flops_profiler = true;  // python/trireme/engine.py refuses it where it is not
  options.takes_events = true;
  options.takes_sizes_from_inputs = true;  // those of parameters are the whole's, too (activations/wholes.py)
  set_facts(options, facts);
  options.present_buffers = [held = shared(module)] {
    const py::gil_scoped_acquire gil;
    return persistent_buffers(*held);
  };
  return options;
}

void bind_engine(py::module_& module) {
  bind_scopes(module);
  module.def("check_models", &check_models, py::arg("world"), py::arg("module"), py::arg("config"),
             py::arg("unmanaged") = std::set<std::string>());
  module.attr("GROUP_HYPERPARAMETERS") = group_hyperparameters();
  EngineBaseClass base(module, "EngineBase", "What all engines have, whoever runs their steps.");
  bind_getters(module, base);
  bind_states(base);
  bind_parts(base);
  bind_numbers(base);
  bind_files(base);
  bind_step_events(base);
  EngineClass engine(module, "Engine", py::multiple_inheritance(),
                     "trireme::Engine over a Python module, which the caller keeps.");
  engine.def(py::init(&make_engine), py::arg("world"), py::arg("module"), py::arg("config"), py::arg("groups"),
             py::arg("make_client"), py::arg("output"), py::arg("facts") = py::none(),
             py::arg("unmanaged") = std::set<std::string>());
  engine.def("check_same_inputs", &ModuleEngine::check_same_inputs, py::arg("values"),
             py::call_guard<py::gil_scoped_release>());
  bind_passes(engine);
}

}  // namespace trireme::python
