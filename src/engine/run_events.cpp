#include "trireme/engine/run_events.h"

#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "engine/step_profile.h"
#include "engine/step_record.h"
#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/intercept.h"
#include "trireme/observe/observation.h"
#include "trireme/observe/run_status.h"
#include "trireme/precision/precision.h"
#include "trireme/training/training.h"

namespace trireme {
namespace {

/// The folder of a record. The variable is one for all engines of a program: those that live beside each other have
/// folders of their own in it.
std::filesystem::path folder_of(const ObserveOptions& options) {
  std::filesystem::path folder = options.record;
  const bool is_variables = options.record == environment("TRIREME_RECORD");
  for (int number = 2; is_variables && StepRecord::is_taken(folder); ++number)
    folder = std::filesystem::path(options.record) / str(number);
  return folder;
}

RunInfo run_info(const Training& training) {
  const Config& config = training.config();
  return {.parameters = training.parameter_count(),
          .ranks = training.groups().model.size(),
          .zero_stage = config.pager.stage,
          .dtype = short_name(config.precision.weight_dtype),
          .config = to_text(config),
          .started = utc_now(),
          .host = host_name(),
          .versions = software_versions()};
}

void add_times(const StepTimes& times, int64_t samples, std::vector<MonitorEvent>& events) {
  const auto add = [&](const char* what, double ms) {
    events.push_back({str("Train/Samples/elapsed_time_ms_", what), ms, samples});
  };
  add("forward", times.forward_ms);
  add("backward", times.backward_ms);
  add("backward_inner", times.backward_inner_ms());
  add("backward_allreduce", times.backward_reduce_ms);
  add("step", times.step_ms);
}

}  // namespace

RunEvents::RunEvents() = default;
RunEvents::~RunEvents() = default;

InitializeOptions RunEvents::opening(InitializeOptions options) {
  counts_flops_ = options.engine_counts_flops && !options.has_flops_profiler;
  options.prepare = [this, takes_events = options.takes_events, others = std::move(options.prepare)](
                        const Config& config, Group& model) {
    if (others) others(config, model);
    const bool records = !config.observe.record.empty();
    if (records)
      all_or_throw(model, [&] {
        if (model.rank() == 0) record_ = std::make_unique<StepRecord>(folder_of(config.observe));
      });
    collects_ = records && model.rank() == 0;
    if (!config.monitors.is_on()) return;
    if (config.monitors.needs_python() && !takes_events)
      throw ConfigError(str("`", config.monitors.wandb.enabled ? "wandb" : "comet",
                            ".enabled` = true needs Python, whose package sends the events; in C++ set it to false, "
                            "and take `tensorboard` or `csv_monitor`"),
                        ErrorCode::kUnsupported);
    collects_ = model.rank() == 0;
    if (takes_events) return;
    all_or_throw(model, [&] {
      if (model.rank() == 0) monitors_ = open_monitors(config.monitors);
    });
  };
  return options;
}

void RunEvents::add_monitor(std::string name, EventSink sink) {
  monitors_.add(std::move(name), std::move(sink));
  collects_ = true;
}

void RunEvents::follow(Training& training, const torch::nn::Module& module) {
  training_ = &training;
  if (counts_flops_ && training.config().flops_profiler.enabled) passes_ = flops_profile(module, training);
  if (const Observation* const observation = training.observation();
      observation != nullptr && training.config().observe.wall_clock_breakdown)
    add_times_ = [observation](int64_t samples, std::vector<MonitorEvent>& events) {
      if (const std::optional<StepTimes> times = observation->step_times()) add_times(*times, samples, events);
    };
  if (!record_) return;
  record_->describe(run_info(training));
  write_line_ = [this] { write_line(); };
}

void RunEvents::set_tokens_per_sample(int64_t tokens) { training_->counts().set_tokens_per_sample(tokens); }

void RunEvents::see_input(const at::Tensor& input) {
  if (input.dim() != 2 || input.scalar_type() != at::kLong) return;
  set_tokens_per_sample(input.size(1));
  if (!record_ || !c10::GradMode::is_enabled()) return;
  window_length_ += input.size(1);
  ++window_inputs_;
}

void RunEvents::add_loss(const at::Tensor& weighted_loss) {
  if (!collects_) return;
  const WithoutInterception own_operators;
  // A copy: the program has the tensor, and may write to it.
  const at::Tensor loss = weighted_loss.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  loss_ = loss_.defined() ? loss_ + loss : loss;
}

void RunEvents::begin_passes() {
  if (passes_.begin && c10::GradMode::is_enabled()) passes_.begin();
}

void RunEvents::end_passes() {
  if (passes_.end) passes_.end();
}

void RunEvents::begin_step() {
  if (!record_) return;
  const auto& groups = training_->step().known_hyperparameters().groups();
  lr_ = groups.empty() ? 0 : groups.front().lr;
}

std::vector<MonitorEvent> RunEvents::take(std::optional<double> lr) {
  if (!collects_) return {};
  const WithoutInterception own_operators;
  TrainStep& step = training_->step();
  const int64_t samples = step.known_progress().global_samples;
  std::vector<MonitorEvent> events;
  if (window_loss_.defined()) events.push_back({"Train/Samples/train_loss", window_loss_.item<double>(), samples});
  const auto& groups = step.hyperparameters().groups();
  if (!lr && !groups.empty()) lr = groups.front().lr;
  if (lr) events.push_back({"Train/Samples/lr", *lr, samples});
  if (const std::optional<double> scale = step.loss_scale())
    events.push_back({"Train/Samples/loss_scale", *scale, samples});
  if (add_times_) add_times_(samples, events);
  return events;
}

void RunEvents::tell() {
  if (passes_.tell) passes_.tell();
  if (!collects_) return;
  window_loss_ = std::exchange(loss_, {});
  if (!monitors_.is_empty()) monitors_.write(take());
  if (record_) write_line_();
}

void RunEvents::write_line() {
  const WithoutInterception own_operators;
  TrainStep& step = training_->step();
  const TrainingProgress& progress = step.progress();
  const int64_t samples = training_->counts().samples();
  const int64_t batch = samples > 0 ? training_->config().batch.train_batch_size : 0;
  const int64_t tokens = tokens_of_window(batch);
  if (tokens_ < 0) tokens_ = (samples - batch) * training_->counts().tokens_per_sample();  // of an earlier run
  tokens_ += tokens;
  const std::optional<double> norm = step.outcome().norm;  // -1: it is not finite
  StepMetrics metrics{.step = progress.global_steps,
                      .samples = samples,
                      .tokens = tokens_,
                      .learning_rate = lr_,
                      .grad_norm = norm && *norm >= 0 ? norm : std::nullopt,
                      .skipped_steps = progress.skipped_steps,
                      .loss_scale = step.loss_scale()};
  if (window_loss_.defined()) metrics.loss = window_loss_.item<double>();
  record_->step(metrics, tokens);
}

int64_t RunEvents::tokens_of_window(int64_t batch) {
  const int64_t length = std::exchange(window_length_, 0), inputs = std::exchange(window_inputs_, 0);
  return inputs > 0 ? batch * length / inputs : batch * training_->counts().tokens_per_sample();
}

void RunEvents::note_checkpoint(const SavedCheckpoint& saved) {
  if (!record_) return;
  record_->checkpoint({.step = training_->step().known_progress().global_steps,
                       .tag = saved.path.filename().string(),
                       .bytes = saved.tensor_bytes,
                       .seconds = saved.seconds});
}

void RunEvents::end(const std::string& reason) {
  passes_ = {};
  if (record_) record_->end(reason);
}

}  // namespace trireme
