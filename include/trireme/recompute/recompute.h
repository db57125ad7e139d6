// Activation checkpointing, called recomputation here: what autograd would keep for backward is dropped in forward and
// computed again when backward asks for it. ("Checkpoint" means saved state in Trireme.)
//
//   auto y = trireme::recompute([block](const at::Tensor& x) { return block->forward(x); }, x);
//
// The main idea: while a RecordScope lives, autograd hands what it wants to save to Trireme (saved-tensor hooks), which
// keeps its number and shape only. The first one that backward asks for runs the function once more, under the same
// hooks, and this time its saved tensors are kept.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <concepts>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "trireme/base/error.h"

namespace trireme {

/// The function did not compute in backward what it computed in forward. Thrown by backward(); code kState.
class RecomputeError : public Error {
 public:
  explicit RecomputeError(const std::string& message) : Error(ErrorCode::kState, message) {}
};

/// Options of recompute().
struct RecomputeOptions {
  /// The function draws the same random numbers again (dropout), from this rank's generator and those of the inputs'
  /// devices. False saves 5 KB per call.
  bool preserve_rng_state = true;
  /// Recomputation ends with the last tensor that backward needs, not with the function.
  bool early_stop = true;
  /// Shape, dtype and device of every recomputed tensor must be those of forward.
  bool determinism_check = true;
  std::string name = "recompute";  ///< opens error messages
};

namespace detail {

class Region;

/// A scope in which the tensors that autograd saves on this thread are dropped. Calling `replay` with the inputs makes
/// them again.
class [[nodiscard]] RecordScope {
 public:
  using Replay = std::function<void(const std::vector<at::Tensor>&)>;
  RecordScope(const RecomputeOptions& options, const std::vector<at::Tensor>& inputs, Replay replay);
  ~RecordScope();
  RecordScope(const RecordScope&) = delete;
  RecordScope& operator=(const RecordScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <class T>
concept TensorLike = std::convertible_to<const T&, const at::Tensor&>;

template <class Function, size_t... kIndex>
void call_with(Function& function, const std::vector<at::Tensor>& inputs, std::index_sequence<kIndex...>) {
  static_cast<void>(std::invoke(function, inputs[kIndex]...));
}

}  // namespace detail

/// Returns function(inputs...), of which autograd keeps the inputs alone; backward calls `function` again.
///
/// The same as torch.utils.checkpoint(use_reentrant=False) in Python. The result may be of any type: tensors, tuples,
/// maps. `function` may capture anything: other arguments, modules, tensors that require gradients. Calls nest: an
/// inner one's inputs are recomputed by the outer one. Several backward passes through one graph work, each recomputes.
/// Without grad mode this is just a call.
///
/// Requires  what `function` captures lives until backward (capture by value where in doubt); it computes the same from
///           the same inputs, and writes neither its inputs nor global state; under ZeRO-3 with gather="copy", on all
///           ranks alike. A BatchNorm inside counts each batch twice.
/// Cost      one more forward per backward, without what follows the last saved tensor.
/// Throws    from backward: RecomputeError when the recomputed tensors differ in number, shape, dtype or device, or
///           when an input or a parameter was written in between.
/// Source    arXiv:1604.06174. Test: recompute_test.cpp.
template <class Function, detail::TensorLike... Inputs>
auto recompute(const RecomputeOptions& options, Function&& function, const Inputs&... inputs) {
  // Shared by this call and by the replays of backward.
  const auto shared = std::make_shared<std::decay_t<Function>>(std::forward<Function>(function));
  if (!at::GradMode::is_enabled()) return std::invoke(*shared, inputs...);
  const detail::RecordScope scope(options, {inputs...}, [shared](const std::vector<at::Tensor>& tensors) {
    detail::call_with(*shared, tensors, std::index_sequence_for<Inputs...>());
  });
  return std::invoke(*shared, inputs...);
}

/// The same with any number of inputs: function(inputs).
template <class Function>
auto recompute(const RecomputeOptions& options, Function&& function, const std::vector<at::Tensor>& inputs) {
  const auto shared = std::make_shared<std::decay_t<Function>>(std::forward<Function>(function));
  if (!at::GradMode::is_enabled()) return std::invoke(*shared, inputs);
  const detail::RecordScope scope(options, inputs, [shared](const std::vector<at::Tensor>& tensors) {
    static_cast<void>(std::invoke(*shared, tensors));
  });
  return std::invoke(*shared, inputs);
}

/// The same with default options.
template <class Function, class... Inputs>
requires(!std::same_as<std::decay_t<Function>, RecomputeOptions>) auto recompute(Function&& function,
                                                                                 const Inputs&... inputs) {
  return recompute(RecomputeOptions{}, std::forward<Function>(function), inputs...);
}

namespace detail {

/// Calls a std::function, a module, a pointer to one, or an element of torch::nn::Sequential.
template <class Layer>
at::Tensor call_layer(Layer& layer, const at::Tensor& x) {
  if constexpr (std::invocable<Layer&, const at::Tensor&>)
    return layer(x);
  else if constexpr (requires { layer->forward(x); })
    return layer->forward(x);
  else
    return layer.forward(x);
}

/// Layers of each segment but the last, which takes the rest. Throws ShapeError unless 1 <= segments <= layers.
size_t layers_per_segment(size_t layers, int segments);

}  // namespace detail

/// Calls `layers` (a container of callables or modules, or *sequential) one after the other, in `segments` runs of
/// equal length, all but the last of which are recomputed. As torch.utils.checkpoint_sequential.
///
/// Throws    ShapeError: not 1 <= segments <= number of layers. From backward: as recompute().
template <class Layers>
at::Tensor recompute_sequential(const RecomputeOptions& options, Layers& layers, int segments,
                                const at::Tensor& input) {
  using Layer = std::decay_t<decltype(*std::begin(layers))>;
  const auto count = static_cast<size_t>(std::distance(std::begin(layers), std::end(layers)));
  const size_t length = detail::layers_per_segment(count, segments);
  at::Tensor x = input;
  auto next = std::begin(layers);
  for (int segment = 0; segment + 1 < segments; ++segment) {
    std::vector<Layer> run(next, next + static_cast<std::ptrdiff_t>(length));
    next += static_cast<std::ptrdiff_t>(length);
    x = recompute(
        options,
        [run = std::move(run)](at::Tensor y) mutable {
          for (Layer& layer : run) y = detail::call_layer(layer, y);
          return y;
        },
        x);
  }
  for (; next != std::end(layers); ++next) x = detail::call_layer(*next, x);
  return x;
}

/// The same with default options.
template <class Layers>
at::Tensor recompute_sequential(Layers& layers, int segments, const at::Tensor& input) {
  return recompute_sequential(RecomputeOptions{}, layers, segments, input);
}

/// A module that can recompute its layers. The engine switches it on where the configuration says so.
class RecomputesLayers {
 public:
  virtual ~RecomputesLayers() = default;
  /// Switches recomputation of the layers on or off.
  virtual void recompute_layers(bool on) = 0;
};

}  // namespace trireme
