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

/// As torch's clip_grad_norm_: the small number keeps a norm of zero from dividing.
double clip_factor(double norm, double max_norm) {
  if (max_norm <= 0) return 1;
  return std::min(1.0, max_norm / (norm + 1e-6));
}

}  // namespace

ForwardScope Engine::begin_forward() {
  require_intact("forward");
  explain_autocast();
  return ForwardScope(config_.precision);
}

at::Tensor Engine::backward(const at::Tensor& loss, const BackwardOptions& options) {
  require_optimizer("backward");
  check_loss(loss, "backward");
  const at::Tensor scaled = loss_scaling_ ? loss_scaling_->scale(loss) : loss;
  // The reduction divides by the accumulation steps; who has done so already gets them back here.
  const int64_t accumulation_steps = gradient_accumulation_steps();
  at::Tensor seed;
  if (!options.scale_wrt_gas && accumulation_steps > 1) seed = at::full_like(scaled, accumulation_steps);
  has_backward_ = true;
  const CallerScope caller("backward");
  const AutocastScope off(AutocastOptions{});  // operators of backward have the dtypes of forward's
  scaled.backward(seed, options.retain_graph || options.create_graph, options.create_graph);
  // The deterministic order is by micro-step, so there step() says when one has ended.
  if (!config_.pager.deterministic) pager_->end_backward();
  return options.scale_wrt_gas ? loss.detach() / accumulation_steps : loss.detach();
}

void Engine::step() {
  require_optimizer("step");
  if (deferral_ != nullptr)
    throw StateError(str("step: inside a ", deferral_, "() scope, where nothing is reduced; let it end first"));
  step_applied_ = false;
  if (config_.managed_gradient_accumulation && !is_gradient_accumulation_boundary()) {
    ++window_micro_steps_;
    ++progress_.micro_steps;
    if (config_.pager.deterministic) pager_->end_backward();
    return seed_micro_batch();
  }
  const CallerScope caller("step");
  buffers_->follow_rank_0();
  const Window window = pager_->close_window();
  check_touched(window);
  update(window);
  pager_->open_window();
  finish_step();
  seed_micro_batch();
}

void Engine::update(const Window& window) {
  const double scale = loss_scale();
  const double norm = std::sqrt(window.sum_of_squares) / scale;
  const bool is_finite = std::isfinite(norm);
  grad_norm_ = is_finite ? norm : -1;
  const bool may_overflow = config_.precision.weight_dtype == at::kBFloat16 && !config_.precision.check_grad_overflow;
  step_applied_ = is_finite || may_overflow;
  if (step_applied_)
    optimizer_->step(window,
                     {.groups = groups_, .gradient_factor = clip_factor(norm, config_.gradient_clipping) / scale});
  else
    skip(window);
}

void Engine::finish_step() {
  start_window();
  if (loss_scaling_) loss_scaling_->scaler().update(!step_applied_);  // throws at the minimum: the step does not count
  ++progress_.micro_steps;
  ++progress_.global_steps;
  progress_.global_samples += train_batch_size();
  if (!step_applied_) ++progress_.skipped_steps;
  // A loss scale that is sought overflows now and then; without one something is wrong. Told ever more rarely.
  const bool is_told = std::has_single_bit(static_cast<uint64_t>(progress_.skipped_steps));
  if (group_.rank() == 0 && !step_applied_ && !loss_scaling_ && is_told)
    log(LogLevel::kWarning,
        str("step ", progress_.global_steps, " changed nothing: a gradient is not finite (", progress_.skipped_steps,
            " such so far); lower the learning rate, or look for what ", "makes the loss overflow"));
  if (step_applied_ && schedule_->options().kind != ScheduleKind::kConstant) follow_schedule();
  if (group_.rank() == 0 && config_.steps_per_print > 0 && progress_.global_steps % config_.steps_per_print == 0)
    log(LogLevel::kInfo, str("step=", progress_.global_steps, ", skipped=", progress_.skipped_steps, ", lr=", get_lr(),
                             ", grad_norm=", *grad_norm_, loss_scaling_ ? str(", loss_scale=", loss_scale()) : ""));
}

void Engine::follow_schedule() {
  const int64_t applied = progress_.global_steps - progress_.skipped_steps;
  const std::optional<double> momentum = schedule_->momentum(applied);
  for (size_t group = 0; group < groups_.size(); ++group) {
    groups_[group].lr = schedule_->lr(applied, group);
    if (momentum) set_momentum(groups_[group], {*momentum, Schedule::kCycleBeta2});
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
  skip(window);
  pager_->open_window();
  start_window();
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
