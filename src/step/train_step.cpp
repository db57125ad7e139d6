#include "trireme/step/train_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <exception>
#include <utility>

#include "step/agreement.h"
#include "step/step_decider.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/notices.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/stream.h"
#include "trireme/precision/autocast.h"
#include "trireme/step/loss_checks.h"

namespace trireme {

namespace {

// Several losses may each have their backward pass before one step().
constexpr int64_t kPassesBeforeStep = 10;

}  // namespace

TrainStep::TrainStep(TrainStepParts parts, const TrainStepOptions& options)
    : shards_(parts.shards),
      model_(parts.model),
      place_(parts.place),
      pager_(&parts.pager),
      buffers_(parts.buffers),
      optimizer_(std::move(parts.optimizer)),
      hyperparameters_(std::move(parts.hyperparameters)),
      prove_(std::move(parts.prove)),
      spoil_(std::move(parts.spoil)),
      ended_(std::move(parts.ended)),
      options_(options),
      agreement_(std::make_unique<StepAgreement>(model_, *pager_, &model_ != &shards_)) {
  choose_decider();
  set_batch(options.micro_batch_size, options.accumulation_steps);
  if (pager_->policy().deterministic) streams_.emplace(model_, place_, pager_->device());
  seed_micro_batch();
}

TrainStep::~TrainStep() = default;

void refuse_destroyed(const char* call) {
  throw StateError(str(call, ": the engine was destroyed; initialize() a new one"));
}

void TrainStep::require_there(const char* call) const {
  if (pager_ == nullptr) refuse_destroyed(call);
}

void TrainStep::choose_decider() {
  const PrecisionOptions& precision = options_.precision;
  const bool has_scale = optimizer_ && precision.needs_loss_scale();
  const bool clamps = pager_->policy().stage == 0;  // as FP16_Optimizer, which DeepSpeed has at that stage
  // With a loss scale, skipped steps are how it finds its value.
  const StepRules rules{
      .decisions = {.skips = skips_overflows(precision),
                    .loss_scale = has_scale ? std::optional(precision.loss_scale) : std::nullopt,
                    .rule = loss_scale_rule_.value_or(clamps ? LossScaleRule::kClamp : LossScaleRule::kHysteresis)},
      .max_norm = options_.max_norm,
      .tells_of_skips = !has_scale && model_.rank() == 0};
  if (has_scale) scaled_passes_.emplace();
  // With a fixed scale of 1 a loss is its own scaled loss.
  if (has_scale && precision.loss_scale.loss_scale != 1)
    pager_->set_gradient_check([this] {
      if (scaled_passes_->is_scaled()) return;
      throw StateError(
          str("Loss scaling is required for this configuration, and backward() came from a loss that was not "
              "scaled (the scale is ",
              *loss_scale(), "): call engine.backward(loss), or engine.scale(loss).backward()"));
    });
  // Betas that follow the number of applied steps are numbers of the host.
  const bool cycles_momentum = rules.decisions.skips && hyperparameters_.schedule().momentum(0).has_value();
  const bool decides = rules.decisions.skips || has_scale || rules.max_norm > 0;
  const bool takes_decisions = optimizer_ && optimizer_->takes_decisions();
  // Offloaded units are updated on the host, which has to know then whether the step is applied.
  const bool by_host = is_host(pager_->device()) || !optimizer_ || cycles_momentum || (decides && !takes_decisions);
  decider_ = by_host ? make_host_decider(rules) : make_device_decider(pager_->device(), rules, takes_decisions);
}

void TrainStep::require_ready_for_optimizer() const {
  require_there("set_optimizer");
  if (optimizer_) throw StateError("set_optimizer: there is an optimizer already; make a new engine for another one");
  if (options_.precision.needs_loss_scale() && window_.passes(pager_->gradients_so_far()) > 0)
    throw StateError(
        "set_optimizer: this window has gradients without the loss scale that fp16 begins with here; call zero_grad() "
        "first, or set_optimizer() before the window's first backward pass");
}

void TrainStep::set_optimizer(std::unique_ptr<ShardedOptimizer> optimizer, Hyperparameters hyperparameters) {
  require_ready_for_optimizer();
  optimizer_ = std::move(optimizer);
  hyperparameters_ = std::move(hyperparameters);
  choose_decider();
}

void TrainStep::set_loss_scale(const LossScaleChoice& choice) {
  require_ready_for_optimizer();
  check_loss_scale(choice.options);
  options_.precision.loss_scale = choice.options;
  loss_scale_rule_ = choice.rule;
}

at::Tensor TrainStep::scale(const at::Tensor& output) const {
  check_has_graph(output, "scale");
  if (!scaled_passes_) return output;
  const at::AutoGradMode with_graph(true);
  return scaled_passes_->mark(decider_->scaled(output.to(at::kFloat)));
}

void TrainStep::backward_from(const torch::autograd::edge_list& outputs, const std::vector<at::Tensor>& gradients,
                              const PassOptions& options) {
  require_there("backward");
  if (options.goes_on && options.ends_micro_batch)
    throw Error(ErrorCode::kInternal, "backward: a piece ends its micro-batch, and another one is to follow");
  window_.begin_pass(options.goes_on);
  const CallerScope caller("backward", pager_);
  std::optional<ScaledPasses::Scope> scaled;
  if (scaled_passes_) scaled.emplace(*scaled_passes_);
  // Operators of backward have the dtypes of forward's.
  const AutocastScope off(AutocastOptions{}, pager_->device().type());
  torch::autograd::Engine::get_default_engine().execute(outputs, gradients,
                                                        options.retain_graph || options.create_graph,
                                                        options.create_graph, /*accumulate_grad=*/true, options.to);
  if (options.goes_on) return;
  // The deterministic order is by micro-batch.
  if (options.ends_micro_batch || !pager_->policy().deterministic) pager_->end_backward();
}

StepReport TrainStep::step() {
  require_steppable();
  has_ended_window_ = false;
  const bool has_backward = window_.begin_step(pager_->gradients_so_far());
  if (!options_.managed_accumulation || is_boundary()) return close(has_backward, /*micro_steps=*/1);
  if (!has_backward) tell_missing_backward();
  window_.count_step();
  ++progress_.micro_steps;
  if (pager_->policy().deterministic) pager_->end_backward();
  seed_micro_batch();
  return {};
}

StepReport TrainStep::end_window() {
  require_steppable();
  has_ended_window_ = false;
  return close(/*has_backward=*/true, options_.accumulation_steps);
}

void TrainStep::require_steppable() const {
  require_there("step");
  if (!optimizer_) throw StateError("step: there is no optimizer; give one at initialization, or by set_optimizer()");
  if (window_.deferral() == nullptr) return;
  throw StateError(str("step: inside a ", window_.deferral(), "() scope, where nothing is reduced; let it end first"));
}

StepReport TrainStep::close(bool has_backward, int64_t micro_steps) {
  const CallerScope caller("step", pager_);
  const int64_t samples = samples_of_window();
  buffers_.follow_rank_0();  // on the host the first meeting of a step: a rank that is in another method is named here
  ClosedWindow window = pager_->close_window();
  const Agreement agreement = agreement_->meet(window);
  require_gradients(agreement, window);
  if (!has_backward) tell_missing_backward();
  const std::exception_ptr problem = end_update(window, agreement);
  if (problem && !options_.may_fail_alone) std::rethrow_exception(problem);
  if (options_.may_fail_alone) throw_together(problem);
  finish(samples, micro_steps);
  seed_micro_batch();
  return {.ended_window = true, .applied = decider_->applied_if_known()};
}

/// Updates and opens the window, whatever happens. Returns the error of this rank alone.
std::exception_ptr TrainStep::end_update(ClosedWindow& window, const Agreement& agreement) {
  try {
    if (prove_) prove_();
  } catch (const CommError&) {
    throw;
  } catch (...) {
    give_up(window);
    throw;  // on every rank
  }
  std::exception_ptr problem;
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const CommError&) {
      throw;  // the group is dead, and with it every collective
    } catch (...) {
      if (!problem) problem = std::current_exception();
    }
  };
  attempt([&] { update(window, agreement.sum_of_squares); });
  attempt([&] { problem ? give_up(window) : window.open(); });
  return problem;
}

void TrainStep::throw_together(const std::exception_ptr& problem) {
  try {
    together(model_, [&] {
      if (problem) std::rethrow_exception(problem);
    });
  } catch (const std::exception& error) {
    if (spoil_) spoil_(error.what());
    throw;
  }
}

// The gradients of a step that failed must not join those of the next one.
void TrainStep::give_up(ClosedWindow& window) {
  window.abandon();
  window_.restart();
  seed_micro_batch();
}

// Seen by all ranks alike, so all of them reopen the window before they throw.
void TrainStep::require_gradients(const Agreement& agreement, ClosedWindow& window) {
  const bool allows_missing = options_.ignore_unused_parameters || !agreement.missing_rank;
  if (agreement.any_gradient && allows_missing) return;
  optimizer_->refresh_masters(window.written());
  give_up(window);
  if (!agreement.any_gradient)
    throw StateError("step: no parameter got a gradient on any rank since the last step; call backward(loss) first");
  const std::string parameter = agreement.missing_here
                                    ? str("parameter '", pager_->parameters()[*agreement.missing_here].name, "'")
                                    : str("a parameter of rank ", *agreement.missing_rank, ", which names it,");
  throw StateError(str("step: ", parameter,
                       " got no gradient on any rank; set zero_optimization.ignore_unused_parameters=true if that is "
                       "meant"));
}

void TrainStep::update(ClosedWindow& window, const at::Tensor& sum_of_squares) {
  if (const auto options = decider_->decide(sum_of_squares, hyperparameters_))
    return optimizer_->step(window, *options);
  // Skipped, on every rank: the norm that decides is that of all ranks.
  optimizer_->refresh_masters(window.written());
  for (const OwnedSlice& slice : pager_->owned()) window.publish(slice.unit);
}

void TrainStep::finish(int64_t samples, int64_t micro_steps) {
  window_.restart();
  decider_->conclude();  // throws at the smallest loss scale: the step does not count
  has_ended_window_ = true;
  progress_.micro_steps += micro_steps;
  ++progress_.global_steps;
  progress_.global_samples += samples;
  hyperparameters_.follow(decider_->known_applied_steps());
  if (ended_) ended_(progress_);
  if (has_listeners())
    tell({.kind = Notice::Kind::kWindow,
          .name = "step",
          .number = progress_.global_steps,
          .rank = model_.world_rank(model_.rank()),
          .begin = Notice::Clock::now(),
          .end = Notice::Clock::now()});
  if (model_.rank() != 0 || options_.steps_per_print == 0 || progress_.global_steps % options_.steps_per_print != 0)
    return;
  const std::optional<double> scale = loss_scale();
  log(LogLevel::kInfo, str("step=", progress_.global_steps, ", skipped=", progress().skipped_steps,
                           ", lr=", hyperparameters().groups()[0].lr, ", grad_norm=", *outcome().norm,
                           scale ? str(", loss_scale=", *scale) : ""));
}

void TrainStep::step_without_gradients() {
  require_there("step_without_gradients");
  require_no_window("step_without_gradients");
  const CallerScope caller("step_without_gradients");
  ClosedWindow window = pager_->close_window();
  window.meet();
  optimizer_->step(window, {.groups = hyperparameters().groups()});
  window.open();
}

void TrainStep::zero_grad() {
  require_there("zero_grad");
  const CallerScope caller("zero_grad");
  if (is_host(pager_->device())) shards_.barrier();  // a rank that is in another method is named here
  ClosedWindow window = pager_->close_window();
  window.meet();
  if (optimizer_) optimizer_->refresh_masters(window.written());
  window.open();
  window_.drop_gradients();
}

void TrainStep::restart_window() {
  window_.restart();
  seed_micro_batch();
}

bool TrainStep::is_boundary() const {
  return options_.managed_accumulation && window_.ends(options_.accumulation_steps);
}

void TrainStep::set_boundary(bool is_boundary) {
  if (!options_.managed_accumulation)
    throw StateError(
        "set_gradient_accumulation_boundary: with managed_gradient_accumulation=false every step() ends a window; call "
        "step() where the window ends");
  window_.set_boundary(is_boundary);
}

void TrainStep::defer(const char* scope) {
  if (scope != nullptr && window_.deferral() != nullptr)
    throw StateError(str(scope, ": inside another ", window_.deferral(), "() scope; one is enough"));
  window_.set_deferral(scope);
  if (pager_ != nullptr) pager_->defer_reductions(scope != nullptr);
}

void TrainStep::require_no_window(const char* call) const {
  if (window_.has_begun())
    throw StateError(str(call, ": inside an accumulation window; call it after the step() that ends one"));
}

void TrainStep::set_batch(int64_t micro_batch_size, int64_t accumulation_steps) {
  require_there("set_batch");
  options_.micro_batch_size = micro_batch_size;
  options_.accumulation_steps = accumulation_steps;
  pager_->set_accumulation_steps(divisor_.value_or(accumulation_steps));
}

void TrainStep::divide_gradients_by(std::optional<int64_t> divisor) {
  divisor_ = divisor;
  set_batch(options_.micro_batch_size, options_.accumulation_steps);
}

void TrainStep::tell_missing_backward() {
  if (std::exchange(has_told_backward_, true)) return;
  log(LogLevel::kWarning,
      str("step: rank ", model_.rank(),
          " had no backward pass since its last step(), so its gradients of this micro-batch count as "
          "zero in the mean; call backward(loss) before step() on every rank"));
}

void TrainStep::tell_missing_step() {
  if (has_told_step_ || !optimizer_ || !options_.managed_accumulation) return;
  const int64_t passes = window_.passes_since_step(pager_->gradients_so_far());
  if (passes <= kPassesBeforeStep) return;
  has_told_step_ = true;
  if (model_.rank() == 0)
    log(LogLevel::kWarning,
        str(passes,
            " backward passes since the last step(), so no weight has changed: call step() of the engine "
            "after each backward(). An optimizer of torch beside the engine changes nothing, because the "
            "engine takes the gradients"));
}

// Samples of all ranks; each is taken to have as many micro-batches as this one.
int64_t TrainStep::samples_of_window() const {
  const int64_t passes =
      options_.managed_accumulation ? options_.accumulation_steps : window_.passes(pager_->gradients_so_far());
  return passes * options_.micro_batch_size * place_.size;
}

void TrainStep::start_micro_batch(int64_t micro_batch) const {
  if (streams_) streams_->start(progress_.global_samples / options_.micro_batch_size, micro_batch);
}

bool TrainStep::was_applied() { return has_ended_window_ && decider_->outcome().applied; }
std::optional<bool> TrainStep::applied_if_known() const {
  return has_ended_window_ ? decider_->applied_if_known() : false;
}
StepOutcome TrainStep::outcome() { return decider_->outcome(); }

const TrainingProgress& TrainStep::progress() {
  const DeciderState decided = decider_->state();
  progress_.skipped_steps = decided.steps - decided.applied_steps;
  return progress_;
}

Hyperparameters& TrainStep::hyperparameters() {
  hyperparameters_.follow(decider_->state().applied_steps);
  return hyperparameters_;
}

std::optional<double> TrainStep::loss_scale() {
  return scaled_passes_ ? std::optional(decider_->state().scaler.scale) : std::nullopt;
}

TrainStepState TrainStep::state() {
  TrainStepState state{.progress = progress()};
  if (scaled_passes_) state.loss_scaler = decider_->state().scaler;
  if (streams_) state.micro_batch_seed = streams_->seed();
  return state;
}

void TrainStep::resume(const TrainStepState& state) {
  progress_ = state.progress;
  const int64_t applied_steps = progress_.global_steps - progress_.skipped_steps;
  decider_->set(progress_.global_steps, applied_steps, state.loss_scaler);
  hyperparameters_.keep(applied_steps);
  if (streams_ && state.micro_batch_seed) streams_->set_seed(*state.micro_batch_seed);
  seed_micro_batch();
}

void TrainStep::release() {
  optimizer_.reset();
  pager_ = nullptr;
}

}  // namespace trireme
