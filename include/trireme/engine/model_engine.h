// An Engine that is called like the module it trains.
#pragma once

#include <c10/util/Exception.h>
#include <torch/nn/module.h>

#include <concepts>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "trireme/checkpoint/consolidate.h"
#include "trireme/comm/world.h"
#include "trireme/engine/engine.h"
#include "trireme/pager/init/gathered.h"

namespace trireme {

/// The module itself, given a module, a ModuleHolder or a shared_ptr.
template <class Net>
auto& module_of(Net& net) {
  if constexpr (requires { *net; })
    return *net;
  else
    return net;
}

/// An Engine over a torch::nn module of type Net, which outlives it.
template <class Net>
class ModelEngine : public Engine {
 public:
  /// As Engine's. Collective.
  ModelEngine(Group& group, Net& net, const InitializeOptions& options = {}) : Engine(group, net, options), net_(net) {}

  /// net.forward(inputs...), under autocast where torch_autocast.enabled says so.
  ///
  /// Throws    StateError: at ZeRO stage 3 with gather="copy", in another thread than the engine's. ShapeError: an
  ///           input, or a buffer, has another dtype than the weights, and the module cannot compute with both.
  template <class... Inputs>
  decltype(auto) forward(Inputs&&... inputs) {
    ForwardScope scope = begin_forward();
    std::vector<at::ScalarType> dtypes;
    (look_at_if_tensor(scope, inputs, dtypes), ...);
    try {
      return net_.forward(scope.input(std::forward<Inputs>(inputs))...);
    } catch (const c10::Error& error) {
      scope.explain(error.what_without_backtrace(), dtypes);
      throw;
    }
  }
  template <class... Inputs>
  decltype(auto) operator()(Inputs&&... inputs) {
    return forward(std::forward<Inputs>(inputs)...);
  }

  using Engine::load_checkpoint;
  /// The same, but `custom_load_fn` writes weights and buffers into the module, for example where they were saved under
  /// other names. It is called on every rank with the saved weights (fp32_state_dict()) and the module, both whole;
  /// rank 0's parameters become everybody's. Not called when there is no checkpoint. If it throws, the engine refuses
  /// to train until a load succeeds.
  template <std::invocable<const std::map<std::string, at::Tensor>&, Net&> Load>
  std::optional<LoadedState> load_checkpoint(const std::filesystem::path& directory, LoadCheckpointOptions options,
                                             Load&& custom_load_fn) {
    options.load_module = false;
    auto loaded = load_checkpoint(directory, options);
    if (!loaded) return loaded;
    zero::GatheredParameters whole(net_, {.modifier_rank = 0});
    custom_load_fn(fp32_state_dict(open_checkpoint(directory / loaded->tag)), net_);
    whole.close();
    return loaded;
  }

  void train() { net_.train(); }
  void eval() { net_.eval(); }
  Net& module() const { return net_; }

 private:
  template <class Input>
  static void look_at_if_tensor(ForwardScope& scope, const Input& input, std::vector<at::ScalarType>& dtypes) {
    if constexpr (std::is_same_v<Input, at::Tensor>) {
      if (!input.defined()) return;
      if (dtypes.empty()) scope.look_at(input);
      dtypes.push_back(input.scalar_type());
    }
  }

  Net& net_;
};

template <class Net>
using ModelEngineOf = ModelEngine<std::remove_reference_t<decltype(module_of(std::declval<Net&>()))>>;

/// Makes `net` (a module, a ModuleHolder or a shared_ptr; unmodified) trainable over the ranks of `group`. Collective.
///
/// Requires, Throws: as Engine::Engine.
template <class Net>
ModelEngineOf<Net> initialize(Group& group, Net& net, const InitializeOptions& options = {}) {
  return ModelEngineOf<Net>(group, module_of(net), options);
}

/// The same over all ranks of the job.
template <class Net>
ModelEngineOf<Net> initialize(World& world, Net& net, const InitializeOptions& options = {}) {
  return ModelEngineOf<Net>(*world.group, module_of(net), options);
}

}  // namespace trireme
