// An engine over a Python module.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/world.h"
#include "trireme/comm/agreement.h"
#include "trireme/engine/engine.h"

namespace trireme::python {

/// Keeps what an engine over a Python module needs to outlive it.
struct KeptModule {
  std::shared_ptr<WorldHandle> world;
  std::shared_ptr<torch::nn::Module> mirror;
};

class ModuleEngine final : private KeptModule, public Engine {
 public:
  ModuleEngine(std::shared_ptr<WorldHandle> world, std::shared_ptr<torch::nn::Module> mirror,
               const InitializeOptions& options)
      : KeptModule{std::move(world), std::move(mirror)},
        Engine(group_of(*KeptModule::world), *KeptModule::mirror, options) {}

  bool is_forked() const { return world->is_forked(); }
  /// As Training::set_optimizer(). Collective.
  void set_optimizer(const OptimizerChoice& choice) { training().set_optimizer(choice); }
  /// As no_sync(), without a scope and without an optimizer; `scope` is named where a step comes inside.
  void defer_reductions(const char* scope) { training().step().defer(scope); }
  /// The first of `values` that differs over the ranks that have slices of the same layers. Collective there.
  std::optional<size_t> check_same_inputs(const std::vector<int64_t>& values) {
    Group* const slices = training().groups().slices;
    const auto difference = slices != nullptr ? first_difference(*slices, values) : std::nullopt;
    return difference ? std::optional(difference->index) : std::nullopt;
  }
};

using EngineBaseClass = py::class_<EngineBase, std::shared_ptr<EngineBase>>;
void bind_parts(EngineBaseClass& engine);
void bind_step_events(EngineBaseClass& engine);

/// The options of an engine over `module` by what Python gives; `facts`: trireme.tensor.model_facts.ModelFacts; a
/// set of names, TrainingOptions::own_slices; or None. Requires the GIL.
InitializeOptions options_of(const py::object& module, const Config& config, const std::vector<py::dict>& groups,
                             const py::object& make_client, const std::string& output,
                             const py::object& facts = py::none());

/// The optimizer of `config`, or the one that `make_client` makes, over these groups. Requires the GIL.
OptimizerChoice optimizer_choice(const Config& config, const std::vector<py::dict>& groups,
                                 const py::object& make_client);

/// Makes an engine, without the GIL, that can be let go by threads that hold it.
template <class Make>
auto share_engine(Make make) {
  const py::gil_scoped_release no_gil;
  using MadeEngine = std::remove_pointer_t<decltype(make())>;
  // Its end waits for a save in the background, whose thread may want the lock, for a message or to look for signals.
  return std::shared_ptr<MadeEngine>(make(), [](MadeEngine* engine) {
    if (engine->is_forked()) return;  // its threads are not there to be waited for
    std::optional<py::gil_scoped_release> released;
    if (PyGILState_Check()) released.emplace();
    delete engine;
  });
}

}  // namespace trireme::python
