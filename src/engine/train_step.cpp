// The training step as the ZeRO paper has it: forward, backward, reduce, update, with the shards left to the pager.
#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>

#include "engine/buffers.h"
#include "engine/loss_checks.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/engine/engine.h"
#include "trireme/precision/loss_scaling.h"

namespace trireme {

namespace {

/// As torch's clip_outcome_.norm: the small number keeps a norm of zero from dividing.
double clip_factor(double norm, double max_norm) {
  if (max_norm <= 0) return 1;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

void explain_autocast_around(const AutocastOptions& autocast) {
  if (autocast.enabled)
    log(LogLevel::kInfo,
        str("forward: autocast is on around it; inside, torch_autocast's dtype holds, ", short_name(autocast.dtype)));
  else
    log(LogLevel::kWarning,
        "forward: autocast is on around it, and torch_autocast.enabled is false: inside, autocast is off. Set "
        "torch_autocast.enabled=true to have it");
}

}  // namespace

ForwardScope Engine::begin_forward() {
  require_intact("forward");
  require_operators_seen();
  tell_missing_step();
  if (!has_explained_autocast_ && AutocastScope::is_on(pager_->device().type())) {
    has_explained_autocast_ = true;
    if (group_.rank() == 0) explain_autocast_around(config_.precision.autocast);
  }
  return {config_.precision, pager_->device().type()};
}

at::Tensor Engine::backward(const at::Tensor& loss, const BackwardOptions& options) {
  require_optimizer("backward");
  check_loss(loss, "backward");
  const at::Tensor scaled = scale(loss);
  // The reduction divides by the accumulation steps; who has done so already gets them back here.
  const int64_t accumulation_steps = gradient_accumulation_steps();
  at::Tensor seed;
  if (!options.scale_wrt_gas && accumulation_steps > 1) seed = at::full_like(scaled, accumulation_steps);
  tell_missing_step();
  window_.has_backward = true;
  ++window_.backward_passes;
  const CallerScope caller("backward");
  const AutocastScope off(AutocastOptions{},
                          pager_->device().type());  // operators of backward have the dtypes of forward's
  scaled.backward(seed, options.retain_graph || options.create_graph, options.create_graph);
  // The deterministic order is by micro-step, so there step() says when one has ended.
  if (!config_.pager.deterministic) pager_->end_backward();
  return options.scale_wrt_gas ? loss.detach() / accumulation_steps : loss.detach();
}

void Engine::step() {
  require_optimizer("step");
  if (window_.deferral != nullptr)
    throw StateError(str("step: inside a ", window_.deferral, "() scope, where nothing is reduced; let it end first"));
  outcome_.applied = false;
  const bool has_backward = has_new_backward();
  if (config_.managed_gradient_accumulation && !is_gradient_accumulation_boundary()) {
    if (!has_backward) tell_missing_backward();
    ++window_.micro_steps;
    ++progress_.micro_steps;
    if (config_.pager.deterministic) pager_->end_backward();
    return seed_micro_batch();
  }
  const CallerScope caller("step");
  buffers_->follow_rank_0();
  const int64_t samples = samples_of_window();
  const Window window = pager_->close_window();
  check_touched(window);
  if (!has_backward) tell_missing_backward();
  try {
    update(window);
  } catch (const CommError&) {
    throw;  // the group is dead, and with it every collective
  } catch (...) {
    give_up_window();
    throw;
  }
  pager_->open_window();
  finish_step(samples);
  seed_micro_batch();
}

// The gradients of a step that failed must not join those of the next one.
void Engine::give_up_window() {
  pager_->abandon_window();
  window_.restart();
  seed_micro_batch();
}

void Engine::step_without_gradients() {
  require_optimizer("step_without_gradients");
  require_no_window("step_without_gradients");
  const CallerScope caller("step_without_gradients");
  const Window window = pager_->close_window();
  optimizer_->step(window, {.groups = groups_});
  pager_->open_window();
}

void Engine::update(const Window& window) {
  if (device_step_)
    return device_step_->run(*optimizer_, window, groups_, config_.gradient_clipping, progress_.global_steps);
  const double scale = loss_scale();
  const double norm = std::sqrt(window.sum_of_squares.item<double>()) / scale;
  const bool is_finite = std::isfinite(norm);
  outcome_.norm = is_finite ? norm : -1;
  outcome_.applied = is_finite || !skips_overflows(config_.precision);
  if (outcome_.applied)
    optimizer_->step(window,
                     {.groups = groups_, .gradient_factor = clip_factor(norm, config_.gradient_clipping) / scale});
  else
    skip(window);
}

void Engine::finish_step(int64_t samples) {
  window_.restart();
  // Throws at the minimum: the step does not count.
  if (loss_scaling_ && !device_step_) loss_scaling_->scaler().update(!outcome_.applied);
  ++progress_.micro_steps;
  ++progress_.global_steps;
  progress_.global_samples += samples;
  if (device_step_) {
    follow_device();
  } else {
    if (!outcome_.applied) ++progress_.skipped_steps;
    if (group_.rank() == 0 && !outcome_.applied && !loss_scaling_)
      warn_of_skipped_step(progress_.global_steps, progress_.skipped_steps);
    if (outcome_.applied && schedule_->options().kind != ScheduleKind::kConstant) follow_schedule();
  }
  if (group_.rank() == 0 && config_.steps_per_print > 0 && progress_.global_steps % config_.steps_per_print == 0)
    log(LogLevel::kInfo,
        str("step=", progress_.global_steps, ", skipped=", skipped_steps(), ", lr=", get_lr(),
            ", grad_norm=", *get_global_grad_norm(), loss_scaling_ ? str(", loss_scale=", loss_scale()) : ""));
}

void Engine::follow_schedule() {
  const int64_t applied = progress_.global_steps - progress_.skipped_steps;
  for (size_t group = 0; group < groups_.size(); ++group) {
    groups_[group].lr = schedule_->lr(applied, group);
    if (const std::optional<double> momentum = schedule_->momentum(applied, group))
      set_momentum(groups_[group], {*momentum, Schedule::kCycleBeta2});
  }
}

void Engine::check_touched(const Window& window) {
  const std::vector<ParameterSpec>& parameters = pager_->parameters();
  int missing = -1;
  bool any = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (window.touched[i]) any = true;
    if (parameters[i].trainable && !window.touched[i] && missing < 0) missing = static_cast<int>(i);
  }
  if (any && (config_.ignore_unused_parameters || missing < 0)) return;
  // Seen by all ranks alike, so all of them reopen the window before they throw.
  optimizer_->refresh_masters(window.written);
  give_up_window();
  if (!any)
    throw StateError("step: no parameter got a gradient on any rank since the last step; call backward(loss) first");
  throw StateError(
      str("step: parameter '", parameters[missing].name,
          "' got no gradient on any rank; set zero_optimization.ignore_unused_parameters=true if that is meant"));
}

void Engine::skip(const Window& window) {
  optimizer_->refresh_masters(window.written);
  for (const OwnedSlice& slice : pager_->owned()) pager_->publish(slice.unit);
}

}  // namespace trireme
