#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>

#include <cmath>
#include <utility>
#include <vector>

#include "step/step_decider.h"
#include "trireme/device/device.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

// Steps for which rates are laid out at once; at their end the host asks once how many were applied.
constexpr int64_t kTableSteps = 4096;

/// Norm, skipping, loss scale, and the learning rate that follows from how many steps were applied stay on the device.
class DeviceStepDecider final : public StepDecider {
 public:
  DeviceStepDecider(c10::Device device, const StepRules& rules, bool takes_decisions)
      : device_(device), rules_(rules), takes_decisions_(takes_decisions), decider_(device, rules.decisions) {
    known_.scaler = rules.decisions.scaler().state();
  }

  std::optional<StepOptions> decide(const at::Tensor& sum_of_squares, Hyperparameters& hyperparameters) override {
    const WithoutInterception own_operators;
    const at::NoGradGuard no_grad;
    StepOptions options{.groups = hyperparameters.groups()};
    const std::vector<bool> given = hyperparameters.take_given();
    // Values of the steps before this one.
    std::vector<at::Tensor> lr;
    if (rules_.decisions.skips && hyperparameters.has_schedule()) lr = rates(hyperparameters, given);
    const DeviceDecider::Decision decision = decider_.decide(sum_of_squares, rules_.max_norm);
    ++steps_;
    is_settled_ = false;
    if (takes_decisions_) options.decision = StepDecision{decision.gradient_factor, decision.skip, std::move(lr)};
    return options;
  }

  void conclude() override {
    if (const auto seen = decider_.look()) note(*seen);
    if (at_minimum_) LossScaler::throw_at_minimum();
  }

  at::Tensor scaled(const at::Tensor& output) const override { return output * decider_.loss_scale(); }

  std::optional<bool> applied_if_known() const override {
    if (!rules_.decisions.skips) return true;
    return known_.steps == steps_ ? std::optional(known_.applied) : std::nullopt;
  }
  int64_t known_applied_steps() const override { return rules_.decisions.skips ? known_.applied_steps : steps_; }

  StepOutcome outcome() override {
    settle();
    if (!has_decided_) return {};
    return {.norm = std::isfinite(known_.norm) ? known_.norm : -1, .applied = known_.applied};
  }

  DeciderState state() override {
    settle();
    return {known_.steps, known_.applied_steps, known_.scaler};
  }

  void set(int64_t steps, int64_t applied_steps, const std::optional<LossScaler::State>& scaler) override {
    settle();
    if (scaler) {
      LossScaler checked = rules_.decisions.scaler();
      checked.set_state(*scaler);
      known_.scaler = checked.state();
    }
    steps_ = known_.steps = steps;
    known_.applied_steps = applied_steps;
    decider_.set(steps, applied_steps, known_.scaler);
    at_minimum_ = false;
    table_.reset();
  }

 private:
  void settle() {
    if (is_settled_) return;
    note(decider_.read());
    is_settled_ = true;
  }

  void note(const DeviceDecider::Outcome& seen) {
    const bool is_news = std::exchange(known_, seen).steps != seen.steps;
    has_decided_ = true;
    at_minimum_ |= seen.at_minimum;
    if (is_news && !seen.applied && rules_.tells_of_skips)
      warn_of_skipped_step(seen.steps, seen.steps - seen.applied_steps);
  }

  /// By group, [] fp32: the schedule's, by the device's count of applied steps, but where one was `given`.
  std::vector<at::Tensor> rates(const Hyperparameters& hyperparameters, const std::vector<bool>& given) {
    const auto groups = static_cast<int64_t>(given.size());
    if (!table_.defined() || steps_ - first_ >= kTableSteps) {
      settle();
      first_ = known_.applied_steps;
      const at::Tensor rates = pinned_memory(groups * kTableSteps, at::kFloat, device_);
      float* rate = rates.data_ptr<float>();
      for (size_t group = 0; group < given.size(); ++group)
        for (int64_t step = 0; step < kTableSteps; ++step)
          *rate++ = static_cast<float>(hyperparameters.schedule().lr(first_ + step, group));
      table_ = rates.to(device_, /*non_blocking=*/true).view({groups, kTableSteps});
    }
    const at::Tensor row = at::index_select(table_, 1, (decider_.applied_steps() - first_).view({1}));
    std::vector<at::Tensor> lr;
    for (size_t group = 0; group < given.size(); ++group)
      lr.push_back(given[group] ? at::full({}, hyperparameters.groups()[group].lr, row.options())
                                : row.select(0, static_cast<int64_t>(group)).select(0, 0));
    return lr;
  }

  const c10::Device device_;
  const StepRules rules_;
  const bool takes_decisions_;
  DeviceDecider decider_;
  int64_t steps_ = 0;
  DeviceDecider::Outcome known_;  // after the newest step of which the host has heard
  bool is_settled_ = true;        // the host has asked after the last step
  bool has_decided_ = false;
  bool at_minimum_ = false;
  at::Tensor table_;  // [groups, applied steps from first_ on] fp32
  int64_t first_ = 0;
};

}  // namespace

std::unique_ptr<StepDecider> make_device_decider(c10::Device device, const StepRules& rules, bool takes_decisions) {
  return std::make_unique<DeviceStepDecider>(device, rules, takes_decisions);
}

}  // namespace trireme
