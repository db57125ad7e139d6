#include <ATen/TensorOperators.h>

#include <bit>
#include <cmath>

#include "step/step_decider.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/precision/step_arithmetic.h"

namespace trireme {

namespace {

class HostDecider final : public StepDecider {
 public:
  explicit HostDecider(const StepRules& rules) : rules_(rules), scaler_(rules.decisions.scaler()) {}

  std::optional<StepOptions> decide(const at::Tensor& sum_of_squares, Hyperparameters& hyperparameters) override {
    const double norm = std::sqrt(sum_of_squares.item<double>()) / scaler_.scale();
    const bool is_finite = std::isfinite(norm);
    outcome_ = {.norm = is_finite ? norm : -1, .applied = is_finite || !rules_.decisions.skips};
    (void)hyperparameters.take_given();
    if (!outcome_.applied) return std::nullopt;
    const double clip = rules_.max_norm > 0 ? step_arithmetic::clip_factor(norm, rules_.max_norm) : 1;
    return StepOptions{.groups = hyperparameters.groups(), .gradient_factor = clip / scaler_.scale()};
  }

  void conclude() override {
    scaler_.update(!outcome_.applied);
    ++steps_;
    applied_steps_ += outcome_.applied ? 1 : 0;
    if (!outcome_.applied && rules_.tells_of_skips) warn_of_skipped_step(steps_, steps_ - applied_steps_);
  }

  at::Tensor scaled(const at::Tensor& output) const override { return output * scaler_.scale(); }
  std::optional<bool> applied_if_known() const override { return outcome_.applied; }
  int64_t known_applied_steps() const override { return applied_steps_; }
  StepOutcome outcome() override { return outcome_; }
  DeciderState state() override { return {steps_, applied_steps_, scaler_.state()}; }

  void set(int64_t steps, int64_t applied_steps, const std::optional<LossScaler::State>& scaler) override {
    if (scaler) scaler_.set_state(*scaler);
    steps_ = steps;
    applied_steps_ = applied_steps;
  }

 private:
  const StepRules rules_;
  LossScaler scaler_;
  StepOutcome outcome_;
  int64_t steps_ = 0, applied_steps_ = 0;
};

}  // namespace

std::unique_ptr<StepDecider> make_host_decider(const StepRules& rules) { return std::make_unique<HostDecider>(rules); }

void warn_of_skipped_step(int64_t step, int64_t skipped) {
  // Without a dynamic loss scale an overflow is unexpected: warn at the 1st, 2nd, 4th, 8th … skipped step.
  if (!std::has_single_bit(static_cast<uint64_t>(skipped))) return;
  log(LogLevel::kWarning, str("step ", step, " changed nothing: a gradient is not finite (", skipped,
                              " such so far); lower the learning rate, or look for what makes the loss overflow"));
}

}  // namespace trireme
