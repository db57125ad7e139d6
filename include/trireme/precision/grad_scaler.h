// Gradient scaling for any torch::optim::Optimizer, without an engine: torch.amp.GradScaler for C++.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>

namespace torch::optim {
class Optimizer;
}

namespace trireme {

/// Names and defaults are torch.amp.GradScaler's.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;  ///< steps without an overflow after which the scale grows
  bool enabled = true;             ///< false: scaling, unscaling and update() do nothing; step() steps
};

/// Multiplies losses so that small fp16 gradients do not vanish, divides gradients again, and skips steps that
/// overflowed.
///
///   scaler.scale(loss).backward();
///   scaler.unscale_(optimizer);                                    // only to look at gradients: clipping
///   torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
///   scaler.step(optimizer);
///   scaler.update();
class GradScaler {
 public:
  /// The state that a program saves and restores.
  struct State {
    double scale = 65536;
    double growth_factor = 2;
    double backoff_factor = 0.5;
    int64_t growth_interval = 2000;
    int64_t growth_tracker = 0;  ///< steps without an overflow since the scale changed
    bool operator==(const State&) const = default;
  };

  /// Throws    ConfigError: a scale or interval that is not above 0, growth_factor <= 1, backoff_factor outside (0, 1).
  explicit GradScaler(const GradScalerOptions& options = {});

  /// `outputs`, of any shape and floating dtype, times get_scale(), with its graph. fp16 overflows beyond 65504.
  at::Tensor scale(const at::Tensor& outputs) const;

  /// Divides the gradients of `optimizer`'s parameters by the scale, in place, and notes whether one is not finite.
  ///
  /// Throws    StateError: already called since the last update(), or after step(); ShapeError: a gradient in fp16,
  ///           which cannot hold what is unscaled.
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Unscales if unscale_() was not called, then steps unless a gradient is not finite. Returns whether it stepped.
  ///
  /// Throws    StateError: already called since the last update(). As unscale_().
  bool step(torch::optim::Optimizer& optimizer);
  /// Adapts the scale: once per iteration, after the step() of every optimizer.
  ///
  /// Throws    StateError: no optimizer was unscaled since the last update().
  void update();
  /// Sets the scale instead. Throws ConfigError: not finite and above 0.
  void update(double new_scale);

  double get_scale() const { return options_.enabled ? state_.scale : 1; }
  double growth_factor() const { return state_.growth_factor; }
  double backoff_factor() const { return state_.backoff_factor; }
  int64_t growth_interval() const { return state_.growth_interval; }
  bool is_enabled() const { return options_.enabled; }

  const State& state() const { return state_; }
  /// Throws    ConfigError: as the constructor.
  void set_state(const State& state);

 private:
  struct PerOptimizer {
    bool stepped = false;
    bool overflow = false;
  };
  PerOptimizer& unscaled(torch::optim::Optimizer& optimizer);

  GradScalerOptions options_;
  State state_;
  std::map<const torch::optim::Optimizer*, PerOptimizer> optimizers_;  ///< those unscaled since the last update()
};

}  // namespace trireme
