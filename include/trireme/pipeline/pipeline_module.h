// A model as a list of layers, which is cut into the stages of a pipeline.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/sequential.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "trireme/pager/init/init.h"
#include "trireme/pipeline/stage_model.h"
#include "trireme/schedule/schedule.h"

namespace trireme {

/// How to make a layer, and how to call it. It is made on its own stage; other stages make it for a moment if
/// parameters must be counted.
struct LayerSpec {
  std::string type;                                                     ///< name of the class; "function" of a function
  std::function<std::shared_ptr<torch::nn::Module>()> make;             ///< empty: a function without parameters
  std::function<c10::IValue(torch::nn::Module*, c10::IValue)> forward;  ///< called with what `make` returned
  std::string name = {};  ///< in the names of parameters, with dots; empty: its number in the list
  std::string tie = {};   ///< key that tied layers share; empty: not tied
  std::vector<std::string> tied_parameters = {"weight"};  ///< names within the layer, read with `tie`
  double cost = 0;  ///< of computing a micro-batch, in any one unit; read by partition_method "best"
};

namespace detail {

template <class Member>
struct Signature;
template <class R, class C, class... Args>
struct Signature<R (C::*)(Args...)> {
  using Arguments = std::tuple<std::remove_cvref_t<Args>...>;
};
template <class R, class C, class... Args>
struct Signature<R (C::*)(Args...) const> : Signature<R (C::*)(Args...)> {};

/// Calls `function` with `value`: as it is, as the one argument's type, or as the elements of a tuple.
template <class Arguments, class Function>
c10::IValue call_with_value(Function&& function, c10::IValue value) {
  constexpr size_t kCount = std::tuple_size_v<Arguments>;
  static_assert(kCount > 0, "a layer takes at least one argument");
  if constexpr (kCount == 1) {
    using Argument = std::tuple_element_t<0, Arguments>;
    if constexpr (std::is_same_v<Argument, c10::IValue>)
      return function(std::move(value));
    else
      return function(value.to<Argument>());
  } else {
    const auto& elements = value.toTupleRef().elements();
    TORCH_CHECK(elements.size() == kCount, "a layer takes ", kCount, " arguments, and the one before it returned ",
                elements.size());
    return [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      return function(elements[kIndex].to<std::tuple_element_t<kIndex, Arguments>>()...);
    }
    (std::make_index_sequence<kCount>());
  }
}

template <class Function>
using ArgumentsOf = typename Signature<decltype(&std::remove_cvref_t<Function>::operator())>::Arguments;

/// Calls the forward() of a module of class Impl.
template <class Impl>
c10::IValue call_forward(torch::nn::Module* module, c10::IValue value) {
  using Arguments = typename Signature<decltype(&Impl::forward)>::Arguments;
  const auto forward = [&](const auto&... inputs) { return static_cast<Impl*>(module)->forward(inputs...); };
  return call_with_value<Arguments>(forward, std::move(value));
}

}  // namespace detail

/// A torch::nn module of class Impl (as in LinearImpl), made from `arguments` on its stage. Its forward() must not be
/// overloaded or have default arguments; use layer_from() for such a module.
template <class Impl, class... Arguments>
LayerSpec layer(Arguments... arguments) {
  LayerSpec spec;
  spec.type = c10::demangle(typeid(Impl).name());
  spec.make = [arguments...] { return std::make_shared<Impl>(arguments...); };
  spec.forward = detail::call_forward<Impl>;
  return spec;
}

/// The same, called by `forward(Impl&, const at::Tensor&)` in place of the module's own forward().
template <class Impl, class Forward, class... Arguments>
LayerSpec layer_from(Forward forward, Arguments... arguments) {
  LayerSpec spec;
  spec.type = c10::demangle(typeid(Impl).name());
  spec.make = [arguments...] { return std::make_shared<Impl>(arguments...); };
  spec.forward = [forward](torch::nn::Module* module, const c10::IValue& value) {
    return c10::IValue(forward(*static_cast<Impl*>(module), value.toTensor()));
  };
  return spec;
}

/// A function without parameters.
template <class Function>
LayerSpec layer_of(Function function) {
  return {.type = "function", .make = {}, .forward = [function](torch::nn::Module*, c10::IValue value) {
            return detail::call_with_value<detail::ArgumentsOf<Function>>(function, std::move(value));
          }};
}

/// `spec`, whose `parameters` are those of the other layers with the same key.
LayerSpec tied(std::string key, LayerSpec spec, std::vector<std::string> parameters = {"weight"});

/// How a PipelineModule is cut, built and run.
struct PipelineModuleOptions {
  int stages = 1;
  StageModel::Loss loss;
  /// "uniform", "parameters" (trainable ones), "type:REGEX" (of class names), "profile" (measured seconds) or "best":
  /// LayerSpec::cost, or where no layer has one, as "parameters".
  std::string partition_method = "parameters";
  /// Before layer i is built the random number generator is seeded with base_seed + i, so that a model has the same
  /// weights however it is cut.
  bool seed_layers = false;
  int64_t base_seed = 1234;
  std::function<void(int64_t seed)> seed_fn = {};  ///< in place of manual_seed()
  /// The number of layers that are recomputed together in backward; 0: none are.
  int activation_checkpoint_interval = 0;
  std::vector<std::string> checkpointable_layers = {};  ///< "Linear" or "LinearImpl"; empty: all that have parameters
  /// Returns compute(input) and computes it again in backward; empty: recompute() does.
  std::function<c10::IValue(const StageModel::Part& compute, c10::IValue input)> activation_checkpoint_func = {};
  /// A name for pipeline::make_schedule(), and the number of parts of the model on each stage.
  std::string schedule = "1f1b";
  int chunks = 1;
  /// Layers are made under a zero::Init with this policy, over the data-parallel ranks of their stage.
  std::optional<zero::InitPolicy> sharded_init = {};
  c10::IValue profile_input = {};  ///< a micro-batch's, read with partition_method "profile"
  int64_t memory_limit = 0;        ///< bytes that a stage may take under "profile"; 0: any
  bool dynamic_shape = false;      ///< activations may change their shapes from one micro-batch to the next
};

/// A list of layers. Each takes what the one before returned: any nesting of tensors.
class PipelineModule {
 public:
  /// Throws    ConfigError: no layer, no loss, an option out of its range.
  PipelineModule(std::vector<LayerSpec> layers, PipelineModuleOptions options);
  /// The layers of `model`, which every rank has built whole; each rank keeps its own stage's.
  template <std::same_as<torch::nn::Sequential> Model>  // a list in braces is one of layers
  PipelineModule(const Model& model, PipelineModuleOptions options)
      : PipelineModule(layers_of(model), std::move(options)) {}

  const PipelineModuleOptions& options() const { return options_; }
  /// Part p of the model has the layers [result[p], result[p + 1]).
  /// With "profile" this process measures the layers; for a PipelineEngine rank 0 does.
  /// Throws    ConfigError: an unknown partition_method, or one whose inputs are missing.
  std::vector<int64_t> parts() const;
  /// The same layers with these parts.
  PipelineModule with_parts(std::vector<int64_t> bounds) const;
  /// The parts of stage `stage`. Without LayerSpec::name parameters are named as in a torch::nn::Sequential of all
  /// layers: "3.weight".
  StageModel build(int stage) const;

 private:
  static std::vector<LayerSpec> layers_of(const torch::nn::Sequential& model);
  void seed(int64_t layer) const;
  std::string name_of(int64_t layer) const;

  std::vector<LayerSpec> layers_;
  PipelineModuleOptions options_;
  std::vector<int64_t> bounds_;  // as parts() returns them; empty: by partition_method
};

}  // namespace trireme
