#include "trireme/engine/run_events.h"

#include <ATen/TensorOperators.h>

#include <utility>

#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/intercept.h"

namespace trireme {

InitializeOptions RunEvents::opening(InitializeOptions options) {
  options.prepare = [this, takes_events = options.takes_events, others = std::move(options.prepare)](
                        const Config& config, Group& model) {
    if (others) others(config, model);
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

void RunEvents::add_loss(const at::Tensor& weighted_loss) {
  if (!collects_) return;
  const WithoutInterception own_operators;
  // A copy: the program has the tensor, and may write to it.
  const at::Tensor loss = weighted_loss.detach().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  loss_ = loss_.defined() ? loss_ + loss : loss;
}

std::vector<MonitorEvent> RunEvents::take(std::optional<double> lr) {
  if (!collects_) return {};
  const WithoutInterception own_operators;
  const int64_t samples = step_->known_progress().global_samples;
  std::vector<MonitorEvent> events;
  if (loss_.defined()) events.push_back({"Train/Samples/train_loss", loss_.item<double>(), samples});
  drop();
  const auto& groups = step_->hyperparameters().groups();
  if (!lr && !groups.empty()) lr = groups.front().lr;
  if (lr) events.push_back({"Train/Samples/lr", *lr, samples});
  if (const std::optional<double> scale = step_->loss_scale())
    events.push_back({"Train/Samples/loss_scale", *scale, samples});
  return events;
}

void RunEvents::tell() {
  if (!monitors_.is_empty()) monitors_.write(take());
}

}  // namespace trireme
