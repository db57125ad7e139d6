// The engine of one stage of a Python PipelineModule.
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/custom_class.h>

#include <exception>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "python/hyperparameters.h"
#include "python/module_mirror.h"
#include "trireme/base/error.h"
#include "trireme/pipeline/pipeline_engine.h"

namespace trireme::python {
namespace {

/// A value that stays on its rank, as the Python object that it is.
struct HeldObject final : torch::CustomClassHolder {
  explicit HeldObject(std::shared_ptr<py::object> held) : object(std::move(held)) {}
  const std::shared_ptr<py::object> object;
};
c10::IValue held(py::object object) {
  return c10::IValue::make_capsule(c10::make_intrusive<HeldObject>(shared(std::move(object))));
}

c10::IValue to_value(const py::handle& object);

// Values that C++ has no type for travel as tuples that begin with one of these texts, which no other tuple may.
constexpr std::string_view kOwn{"\0trireme:", 9};
const std::string kSize = std::string(kOwn) + "size";    // torch.Size; its numbers
const std::string kInt = std::string(kOwn) + "int";      // an int of more than 64 bits; its digits
const std::string kNumpy = std::string(kOwn) + "numpy";  // a scalar of numpy; its dtype, its bytes
const std::string kNamed = std::string(kOwn) + "named";  // a named tuple; module and name of its class, its elements

std::string name_of_class(const py::handle& object) {
  return py::type::handle_of(object).attr("__name__").cast<std::string>();
}

c10::IValue tuple_of(const std::string& kind, const py::handle& elements, std::vector<c10::IValue> before = {}) {
  before.insert(before.begin(), kind);
  for (const py::handle element : elements) before.push_back(to_value(element));
  return c10::ivalue::Tuple::create(std::move(before));
}

/// The class of that name; None: there is none.
py::object class_named(const std::string& module, const std::string& name) {
  py::object found = py::module_::import("sys").attr("modules").attr("get")(module);
  if (found.is_none()) found = py::module_::import(module.c_str());
  return py::getattr(found, name.c_str(), py::none());
}

c10::IValue named_tuple(const py::handle& object) {
  const py::handle type = py::type::handle_of(object);
  const auto module = type.attr("__module__").cast<std::string>();
  const auto name = type.attr("__qualname__").cast<std::string>();
  if (!class_named(module, name).is(type))
    throw ShapeError(str("a value between layers is a named tuple of the class ", module, ".", name,
                         ", which the next stage cannot find by that name; define the class at the top of a module"));
  return tuple_of(kNamed, object, {module, name});
}

/// As to_value(), or held() where the object is of another kind.
c10::IValue value_or_held(py::object object);

/// A value that may travel to another stage. Requires the GIL.
c10::IValue to_value(const py::handle& object) {
  PyObject* const raw = object.ptr();
  if (object.is_none()) return {};
  if (THPVariable_Check(raw)) return THPVariable_Unpack(raw);
  if (PyBool_Check(raw)) return raw == Py_True;
  if (PyLong_Check(raw)) {
    int has_overflown = 0;
    const long long number = PyLong_AsLongLongAndOverflow(raw, &has_overflown);
    if (has_overflown == 0) return static_cast<int64_t>(number);
    return c10::ivalue::Tuple::create({c10::IValue(kInt), c10::IValue(py::str(object).cast<std::string>())});
  }
  if (THPSize_Check(raw)) return tuple_of(kSize, object);
  if (PyTuple_Check(raw) && py::hasattr(object, "_fields")) return named_tuple(object);
  if (py::hasattr(object, "dtype") && py::hasattr(object, "item") && py::hasattr(object, "tobytes") &&
      py::len(object.attr("shape")) == 0)
    return c10::ivalue::Tuple::create({c10::IValue(kNumpy),
                                       c10::IValue(object.attr("dtype").attr("str").cast<std::string>()),
                                       c10::IValue(object.attr("tobytes")().cast<std::string>())});
  if (PyFloat_Check(raw)) return object.cast<double>();
  if (PyUnicode_Check(raw)) return object.cast<std::string>();
  if (PyTuple_CheckExact(raw)) {
    std::vector<c10::IValue> elements;
    for (const py::handle element : object) elements.push_back(to_value(element));
    if (!elements.empty() && elements[0].isString() && elements[0].toStringRef().starts_with(kOwn))
      throw ShapeError(
          "a tuple between layers begins with a text that Trireme uses itself; give it another first element");
    return c10::ivalue::Tuple::create(std::move(elements));
  }
  if (PyList_CheckExact(raw)) {
    c10::impl::GenericList list(c10::AnyType::get());
    for (const py::handle element : object) list.push_back(to_value(element));
    return list;
  }
  if (PyDict_CheckExact(raw)) {
    c10::impl::GenericDict dict(c10::AnyType::get(), c10::AnyType::get());
    for (const auto& [key, element] : py::reinterpret_borrow<py::dict>(object)) {
      if (!PyUnicode_Check(key.ptr()) && !PyLong_CheckExact(key.ptr()))
        throw ShapeError(str("a dictionary between layers has the key ", py::repr(key).cast<std::string>(),
                             "; use texts or integers as keys"));
      dict.insert(to_value(key), to_value(element));
    }
    return dict;
  }
  throw ShapeError(str("a value between layers is a ", name_of_class(object),
                       "; hand on tensors, None, numbers, texts, and tuples, lists or dictionaries of these"));
}

c10::IValue value_or_held(py::object object) {
  try {
    return to_value(object);
  } catch (const ShapeError&) {
    return held(std::move(object));
  }
}

py::object to_python(const c10::IValue& value);

/// A value of one of the kinds above.
py::object own_value(const std::vector<c10::IValue>& elements) {
  const std::string& kind = elements[0].toStringRef();
  const auto text = [&](size_t index) { return elements.at(index).toStringRef(); };
  if (kind == kInt) return py::reinterpret_steal<py::object>(PyLong_FromString(text(1).c_str(), nullptr, 10));
  if (kind == kNumpy)
    return py::module_::import("numpy").attr("frombuffer")(py::bytes(text(2)), text(1)).attr("__getitem__")(0);
  const size_t begin = kind == kSize ? 1 : 3;
  py::tuple tuple(elements.size() - begin);
  for (size_t i = begin; i < elements.size(); ++i) tuple[i - begin] = to_python(elements[i]);
  if (kind == kSize) return py::module_::import("torch").attr("Size")(tuple);
  return class_named(text(1), text(2))(*tuple);
}

/// The reverse of to_value() and held().
py::object to_python(const c10::IValue& value) {
  if (value.isCapsule()) return *c10::static_intrusive_pointer_cast<HeldObject>(value.toCapsule())->object;
  if (value.isTensor()) return py::cast(value.toTensor());
  if (value.isBool()) return py::bool_(value.toBool());
  if (value.isInt()) return py::int_(value.toInt());
  if (value.isDouble()) return py::float_(value.toDouble());
  if (value.isString()) return py::str(value.toStringRef());
  if (value.isTuple()) {
    const std::vector<c10::IValue> elements = value.toTupleRef().elements().vec();
    if (!elements.empty() && elements[0].isString() && elements[0].toStringRef().starts_with(kOwn))
      return own_value(elements);
    py::tuple tuple(elements.size());
    for (size_t i = 0; i < elements.size(); ++i) tuple[i] = to_python(elements[i]);
    return tuple;
  }
  if (value.isList()) {
    py::list list;
    for (const c10::IValue& element : value.toListRef()) list.append(to_python(element));
    return list;
  }
  if (value.isGenericDict()) {
    py::dict dict;
    for (const auto& entry : value.toGenericDict()) dict[to_python(entry.key())] = to_python(entry.value());
    return dict;
  }
  return py::none();
}

/// {name of a tied parameter: the parts of the model that have it, its owner first}, the same on every rank.
using TiedParts = std::map<std::string, std::vector<int>>;
/// {name of a tied parameter: {part of this stage: the parameter there}}.
using TiedCopiesHere = std::map<std::string, std::map<int, at::Tensor>>;
using PartParameters = std::vector<std::vector<at::Tensor>>;  // by chunk

/// A Python PipelineModule, and how it is run.
struct PythonStage {
  py::object module;  ///< called with a value between layers, and with chunk=: its result is such a value
  py::function loss;  ///< (outputs, labels) -> loss
  TiedParts tied;
  TiedCopiesHere copies;
  PartParameters parameters;
  PipelineOptions pipeline;
};

std::vector<Tie> ties_of(const PythonStage& stage) {
  std::vector<Tie> ties;
  for (const auto& [name, parts] : stage.tied) {
    Tie& tie = ties.emplace_back(Tie{.name = name, .parts = parts, .parameters = {}});
    const auto here = stage.copies.find(name);
    for (const int part : parts) {
      const bool is_here = here != stage.copies.end() && here->second.contains(part);
      tie.parameters.push_back(is_here ? here->second.at(part) : at::Tensor());
    }
  }
  return ties;
}

StageModel model_of(const PythonStage& stage, const Topology& topology, int rank) {
  StageModel model;
  const bool is_cut = topology.has("sequence");  // then outputs of an evaluation are looked into
  model.module = mirror_of(stage.module);
  const int stages = topology.size_of("pipe"), chunks = stage.pipeline.chunks;
  const pipeline::Schedule shape = pipeline::make_schedule(stage.pipeline.schedule, stages, 2 * stages, chunks);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const bool is_last = shape.part_of(topology.position_of(rank, "pipe"), chunk) == shape.parts() - 1;
    model.parts.push_back([compute = shared(stage.module), chunk, chunks, is_last, is_cut](const c10::IValue& input) {
      const py::gil_scoped_acquire gil;
      py::object value = to_python(input);
      py::object output = chunks == 1 ? (*compute)(value) : (*compute)(value, py::arg("chunk") = chunk);
      if (!is_last) return to_value(output);
      return is_cut ? value_or_held(std::move(output)) : held(std::move(output));
    });
  }
  model.loss = [compute = shared(stage.loss)](const c10::IValue& outputs, const c10::IValue& labels) {
    const py::gil_scoped_acquire gil;
    const py::object value = (*compute)(to_python(outputs), to_python(labels));
    if (!THPVariable_Check(value.ptr()))
      throw ShapeError(str("pipeline: the loss function returned a ", name_of_class(value),
                           "; expected a tensor of one floating element"));
    return THPVariable_Unpack(value.ptr());
  };
  model.parameters = stage.parameters;
  model.ties = ties_of(stage);
  return model;
}

/// A PipelineEngine over the stage of a Python PipelineModule.
class StageEngine final : private KeptModule, public PipelineEngine {
 public:
  StageEngine(std::shared_ptr<WorldHandle> world, const Topology& topology, const StageModel& model,
              const PipelineOptions& pipeline, const InitializeOptions& options)
      : KeptModule{std::move(world), model.module},
        PipelineEngine(group_of(*KeptModule::world), topology, model, pipeline, options) {}

  bool is_forked() const { return world->is_forked(); }
};

std::shared_ptr<StageEngine> make_stage_engine(const std::shared_ptr<WorldHandle>& world, const Topology& topology,
                                               const py::object& module, const Config& config,
                                               const std::vector<py::dict>& groups, const py::object& make_client,
                                               const std::string& output, const py::function& loss,
                                               const TiedParts& tied, const TiedCopiesHere& copies,
                                               const PartParameters& parameters, const std::string& schedule,
                                               int chunks, bool has_dynamic_shapes, const py::object& facts) {
  const PythonStage stage{.module = module,
                          .loss = loss,
                          .tied = tied,
                          .copies = copies,
                          .parameters = parameters,
                          .pipeline = {.schedule = schedule, .chunks = chunks, .dynamic_shapes = has_dynamic_shapes}};
  const StageModel model = model_of(stage, topology, world->world.rank);
  const InitializeOptions options = options_of(module, config, groups, make_client, output, facts);
  return share_engine([&] { return new StageEngine(world, topology, model, stage.pipeline, options); });
}

/// Micro-batches of a Python function that returns (inputs, labels), or None at the end of the data.
class PythonData {
 public:
  /// `is_cut`: labels are looked into, to cut those that have tokens.
  PythonData(const py::function& next, bool is_cut) : next_(next), is_cut_(is_cut) {}

  /// Calls `run` with the micro-batches, without the GIL. Where the function raised, so does this; the other ranks
  /// get its text.
  template <class Run>
  auto feed(Run run) {
    const py::gil_scoped_release no_gil;
    try {
      return run([this] { return load(); });
    } catch (const Error&) {
      if (raised_) std::rethrow_exception(raised_);
      throw;
    }
  }

 private:
  std::optional<MicroBatch> load() {
    const py::gil_scoped_acquire gil;
    try {
      const py::object batch = next_();
      if (batch.is_none()) return std::nullopt;
      const auto [inputs, labels] = batch.cast<std::pair<py::object, py::object>>();
      return MicroBatch{.inputs = to_value(inputs), .labels = is_cut_ ? value_or_held(labels) : held(labels)};
    } catch (const py::error_already_set& error) {
      raised_ = std::current_exception();
      throw DataError(error.what());
    }
  }

  const py::function& next_;
  const bool is_cut_;
  std::exception_ptr raised_;
};

/// A step as the engine's: with what the program has changed since the last one.
py::tuple train_batch(StageEngine& self, const py::function& next, const GroupChanges& changes) {
  set_hyperparameters(self, changes);
  PythonData batches(next, self.sequence() != nullptr);
  const at::Tensor loss = batches.feed([&](const MicroBatches& data) { return self.train_batch(data); });
  return py::make_tuple(loss, self.was_step_applied_if_known());
}

py::tuple eval_batch(StageEngine& self, const py::function& next, std::optional<int64_t> micro_batches,
                     bool computes_loss, bool returns_outputs) {
  const EvalResult result = PythonData(next, self.sequence() != nullptr).feed([&](const MicroBatches& data) {
    return self.eval_batch(
        data, {.micro_batches = micro_batches, .computes_loss = computes_loss, .returns_outputs = returns_outputs});
  });
  py::list outputs;
  for (const c10::IValue& output : result.outputs) outputs.append(to_python(output));
  return py::make_tuple(result.loss.defined() ? py::cast(result.loss) : py::none(), outputs);
}

void set_schedule(StageEngine& self, const py::function& make) {
  const auto held_make = shared(make);
  const py::gil_scoped_release no_gil;  // the ranks compare their schedules
  self.set_schedule([make = held_make](int stages, int micro_batches) {
    const py::gil_scoped_acquire gil;
    return (*make)(stages, micro_batches).cast<pipeline::Schedule>();
  });
}

}  // namespace

void bind_pipeline_engine(py::module_& module) {
  py::class_<StageEngine, EngineBase, std::shared_ptr<StageEngine>>(
      module, "StageEngine", py::multiple_inheritance(),
      "trireme::PipelineEngine of the stage that a Python PipelineModule has here.")
      .def(py::init(&make_stage_engine), py::arg("world"), py::arg("topology"), py::arg("module"), py::arg("config"),
           py::arg("groups"), py::arg("make_client"), py::arg("output"), py::arg("loss"), py::arg("tied"),
           py::arg("copies"), py::arg("parameters"), py::arg("schedule"), py::arg("chunks"), py::arg("dynamic_shapes"),
           py::arg("facts") = py::none())
      .def("train_batch", &train_batch, py::arg("next"), py::arg("changes"),
           "(mean loss, whether the weights changed: None where a device has not told).")
      .def("eval_batch", &eval_batch, py::arg("next"), py::arg("micro_batches"), py::arg("computes_loss"),
           py::arg("returns_outputs"), "(mean loss or None, outputs by micro-batch).")
      .def(
          "follow_owners", [](StageEngine& self) { self.runner().follow_owners(); }, WithoutGil())
      .def("reset_activation_shape", [](StageEngine& self) { self.reset_activation_shape(); })
      .def("set_schedule", &set_schedule, py::arg("make"));
}

}  // namespace trireme::python
