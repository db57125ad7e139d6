#include "trireme/precision/grad_scaler.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/optim/optimizer.h>

#include <cmath>
#include <unordered_map>
#include <vector>

#include "precision/positive.h"
#include "trireme/base/error.h"

namespace trireme {

namespace {

void check(const GradScaler::State& state) {
  const auto refuse = [](const char* name, double value, const char* fix) {
    throw ConfigError(str("GradScaler: ", name, "=", value, ": ", fix));
  };
  if (!is_positive(state.scale)) refuse("scale", state.scale, "use a finite number above 0");
  if (!(state.growth_factor > 1)) refuse("growth_factor", state.growth_factor, "use a number above 1");
  if (!(state.backoff_factor > 0 && state.backoff_factor < 1))
    refuse("backoff_factor", state.backoff_factor, "use a number between 0 and 1");
  if (state.growth_interval < 1)
    refuse("growth_interval", static_cast<double>(state.growth_interval), "use 1 or more steps");
  if (state.growth_tracker < 0)
    refuse("growth_tracker", static_cast<double>(state.growth_tracker), "it counts steps: use 0 or more");
}

std::vector<at::Tensor> gradients_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> gradients;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      at::Tensor gradient = parameter.grad();
      if (gradient.scalar_type() == at::kHalf)
        throw ShapeError(
            "GradScaler: expected gradients in fp32 or bf16, got fp16, which cannot hold what is unscaled; keep the "
            "parameters in fp32, and compute in fp16 by autocast");
      if (gradient.is_sparse()) {
        // Duplicates are added up before the check: their sum may overflow.
        gradient = gradient.coalesce();
        parameter.mutable_grad() = gradient;
        gradient = gradient._values();
      }
      gradients.push_back(gradient);
    }
  return gradients;
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options)
    : options_(options),
      state_{options.init_scale, options.growth_factor, options.backoff_factor, options.growth_interval, 0} {
  if (options.enabled) check(state_);
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) const {
  return options_.enabled ? outputs * state_.scale : outputs;
}

GradScaler::PerOptimizer& GradScaler::unscaled(torch::optim::Optimizer& optimizer) {
  const auto [entry, is_new] = optimizers_.try_emplace(&optimizer);
  if (!is_new) return entry->second;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  try {
    gradients = gradients_of(optimizer);
  } catch (...) {
    optimizers_.erase(entry);
    throw;
  }
  std::unordered_map<c10::Device, std::vector<at::Tensor>> by_device;
  for (const at::Tensor& gradient : gradients) by_device[gradient.device()].push_back(gradient);
  for (const auto& [device, there] : by_device) {
    const at::TensorOptions options = at::TensorOptions().dtype(at::kFloat).device(device);
    at::Tensor found = at::zeros({}, options);
    const at::Tensor inverse = at::scalar_tensor(1 / state_.scale, options);
    for (const at::Tensor& gradient : there) {
      std::vector<at::Tensor> one = {gradient};
      at::_amp_foreach_non_finite_check_and_unscale_(one, found, inverse);
    }
    entry->second.overflow |= found.item<float>() != 0;
  }
  return entry->second;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  const auto found = optimizers_.find(&optimizer);
  if (found != optimizers_.end())
    throw StateError(str("unscale_: ", found->second.stepped ? "after step()" : "already called",
                         " for this optimizer since the last update(); call update() first"));
  unscaled(optimizer);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  PerOptimizer& entry = unscaled(optimizer);
  if (entry.stepped)
    throw StateError("step: already called for this optimizer since the last update(); call update() first");
  entry.stepped = true;
  if (entry.overflow) return false;
  optimizer.step();
  return true;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  if (optimizers_.empty())
    throw StateError("update: no gradients were unscaled since the last update(); call step(optimizer) first");
  bool overflow = false;
  for (const auto& [optimizer, entry] : optimizers_) overflow |= entry.overflow;
  optimizers_.clear();
  if (overflow) {
    state_.scale *= state_.backoff_factor;
    state_.growth_tracker = 0;
  } else if (++state_.growth_tracker == state_.growth_interval) {
    // Beyond fp32 the scaled loss itself would not be finite.
    const double grown = state_.scale * state_.growth_factor;
    if (std::isfinite(static_cast<float>(grown))) state_.scale = grown;
    state_.growth_tracker = 0;
  }
}

void GradScaler::update(double new_scale) {
  if (!options_.enabled) return;
  State changed = state_;
  changed.scale = new_scale;
  check(changed);
  state_ = changed;
  optimizers_.clear();
}

void GradScaler::set_state(const State& state) {
  if (!options_.enabled) return;
  check(state);
  state_ = state;
}

}  // namespace trireme
