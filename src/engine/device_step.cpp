#include "engine/device_step.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>

#include <cmath>
#include <utility>

#include "engine/loss_checks.h"
#include "trireme/device/device.h"
#include "trireme/engine/engine.h"
#include "trireme/intercept.h"
#include "trireme/precision/loss_scaling.h"

namespace trireme {

namespace {

// Steps for which rates are laid out at once; at their end the host asks once how many were applied.
constexpr int64_t kTableSteps = 4096;

/// With a loss scale, skipped steps are how it finds its value.
bool warns(const std::unique_ptr<LossScaling>& loss_scaling, const Group& group) {
  return !loss_scaling && group.rank() == 0;
}

/// What is told once, whoever learns of it: the look after each step, or one who asks.
void note(const DeviceDecider::Outcome& seen, StepOutcome& outcome, bool warns) {
  outcome.at_minimum |= seen.at_minimum;
  if (!seen.applied && warns) warn_of_skipped_step(seen.steps, seen.steps - seen.applied_steps);
}

}  // namespace

DeviceStep::DeviceStep(c10::Device device, const DecisionRules& rules, const Schedule& schedule)
    : device_(device), skips_(rules.skips), decider_(device, rules), schedule_(schedule) {}

void DeviceStep::set(int64_t steps, int64_t applied_steps, const LossScaler::State& scaler) {
  decider_.set(steps, applied_steps, scaler);
  table_.reset();
}

void DeviceStep::run(ShardedOptimizer& optimizer, const Window& window, const std::vector<OptimizerOptions>& groups,
                     double max_norm, int64_t attempts) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const bool takes_given_rates = std::exchange(takes_given_rates_, false);
  StepOptions options{.groups = groups};
  // Of the steps before this one.
  std::vector<at::Tensor> lr;
  if (skips_ && !takes_given_rates && schedule_.options().kind != ScheduleKind::kConstant)
    lr = rates(groups.size(), attempts);
  const DeviceDecider::Decision decision = decider_.decide(window.sum_of_squares, max_norm);
  // Else what is decided is that each step is applied as it is.
  if (optimizer.takes_decisions())
    options.decision = StepDecision{decision.gradient_factor, decision.skip, std::move(lr)};
  optimizer.step(window, options);
}

std::vector<at::Tensor> DeviceStep::rates(size_t groups, int64_t attempts) {
  if (!table_.defined() || attempts - first_ >= kTableSteps) {
    first_ = decider_.read().applied_steps;
    const at::Tensor rates = pinned_memory(static_cast<int64_t>(groups) * kTableSteps, at::kFloat, device_);
    float* rate = rates.data_ptr<float>();
    for (size_t group = 0; group < groups; ++group)
      for (int64_t step = 0; step < kTableSteps; ++step)
        *rate++ = static_cast<float>(schedule_.lr(first_ + step, group));
    table_ = rates.to(device_, /*non_blocking=*/true).view({static_cast<int64_t>(groups), kTableSteps});
  }
  const at::Tensor row = at::index_select(table_, 1, (decider_.applied_steps() - first_).view({1}));
  std::vector<at::Tensor> lr;
  for (size_t group = 0; group < groups; ++group) lr.push_back(row.select(0, static_cast<int64_t>(group)).select(0, 0));
  return lr;
}

void Engine::make_deciders() {
  const bool clamps = config_.pager.stage == 0;  // as FP16_Optimizer, which DeepSpeed has at that stage
  const LossScaleRule rule = clamps ? LossScaleRule::kClamp : LossScaleRule::kHysteresis;
  const LossScaleOptions& loss_scale = config_.precision.loss_scale;
  if (config_.precision.needs_loss_scale()) {
    loss_scaling_ = std::make_unique<LossScaling>(loss_scale, rule);
    // With a fixed scale of 1 a loss is its own scaled loss.
    if (loss_scale.loss_scale != 1) pager_->set_gradient_check([this] { loss_scaling_->check_gradient(); });
  }
  const DecisionRules rules{.skips = skips_overflows(config_.precision),
                            .loss_scale = loss_scaling_ ? std::optional(loss_scale) : std::nullopt,
                            .rule = rule};
  // Betas that follow the number of applied steps are numbers of the host.
  const bool cycles_momentum = rules.skips && schedule_->momentum(0).has_value();
  if (is_host(pager_->device()) || cycles_momentum) return;
  // The host, which updates what is offloaded, asks for what decides over that, unless nothing does.
  const bool decides = rules.skips || loss_scaling_ || config_.gradient_clipping > 0;
  if (!optimizer_->takes_decisions() && decides) return;
  device_step_ = std::make_unique<DeviceStep>(pager_->device(), rules, *schedule_);
}

// What the host knows of this step without waiting for it: that it was enqueued.
void Engine::follow_device() {
  outcome_.is_known = false;
  if (const auto seen = device_step_->decider().look()) note(*seen, outcome_, warns(loss_scaling_, group_));
  if (outcome_.at_minimum) LossScaler::throw_at_minimum();
  if (!device_step_->skips()) {
    outcome_.applied = true;
    if (schedule_->options().kind != ScheduleKind::kConstant) follow_schedule();
  }
}

const Engine& Engine::settled() const {
  if (outcome_.is_known) return *this;
  // The state is that of the last step; only the host's knowledge of it comes when somebody asks.
  auto& self = const_cast<Engine&>(*this);
  const DeviceDecider::Outcome outcome = device_step_->decider().read();
  self.outcome_.is_known = true;
  self.outcome_.norm = std::isfinite(outcome.norm) ? outcome.norm : -1;
  self.outcome_.applied = outcome.applied && window_.micro_steps == 0;  // else the last step() was inside a window
  note(outcome, self.outcome_, warns(loss_scaling_, group_));
  self.progress_.skipped_steps = outcome.steps - outcome.applied_steps;
  if (loss_scaling_) self.loss_scaling_->scaler().set_state(outcome.scaler);
  const bool has_moved = std::exchange(self.outcome_.applied_steps, outcome.applied_steps) != outcome.applied_steps;
  if (has_moved && device_step_->skips() && schedule_->options().kind != ScheduleKind::kConstant)
    self.follow_schedule();
  return *this;
}

}  // namespace trireme
