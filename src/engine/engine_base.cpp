#include "trireme/engine/engine_base.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/config/config.h"
#include "trireme/device/stream.h"
#include "trireme/optim/options.h"

namespace trireme {

namespace {

constexpr std::array kOffloadable{"optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"};

}  // namespace

SequenceInputs EngineBase::cut(const SequenceInputs& whole) {
  training_.condition().require_alive("cut");
  return sequence() != nullptr ? sequence()->cut(whole) : whole;
}

void EngineBase::step_without_gradients() {
  require_optimizer("step_without_gradients");
  training_.step().step_without_gradients();
}

void EngineBase::zero_grad() {
  training_.condition().require_alive("zero_grad");
  events_.drop();
  training_.step().zero_grad();
}

double EngineBase::get_lr(size_t group) const {
  return group_count() == 0 && group == 0 ? 0 : training_.step().hyperparameters().of(group, "get_lr").lr;
}

void EngineBase::set_lr(double lr, std::optional<size_t> group) {
  require_optimizer("set_lr");
  if (!(lr >= 0) || !std::isfinite(lr)) throw ConfigError(str("set_lr: ", lr, " is no learning rate; use 0 or more"));
  Hyperparameters& hyperparameters = training_.step().known_hyperparameters();
  if (group) (void)hyperparameters.of(*group, "set_lr");
  for (size_t i = 0; i < group_count(); ++i)
    if (!group || i == *group) hyperparameters.set_lr(i, lr);
}

const OptimizerOptions& EngineBase::hyperparameters(size_t group) const {
  require_optimizer("hyperparameters");
  return training_.step().hyperparameters().of(group, "hyperparameters");
}

const OptimizerOptions& EngineBase::known_hyperparameters(size_t group) const {
  require_optimizer("known_hyperparameters");
  return training_.step().known_hyperparameters().of(group, "known_hyperparameters");
}

// Memory for states is laid out once, by the hyperparameters of initialize().
void EngineBase::require_states(const OptimizerOptions& options, size_t group) const {
  const ShardedOptimizer& optimizer = *training_.step().optimizer();
  const size_t wanted = optimizer_states(options).size();
  for (size_t i = 0; i < pager().parameters().size(); ++i) {
    const int parameter = static_cast<int>(i);
    if (optimizer.group_of(parameter) != static_cast<int>(group)) continue;
    if (optimizer.state_names(parameter).size() < wanted)
      throw ConfigError(str("set_hyperparameters: group ", group, " began with momentum=0, so it has no momentum ",
                            "buffer, and now momentum=", options.momentum,
                            "; begin with a momentum above 0, however small, or leave it 0"));
    return;
  }
}

void EngineBase::set_hyperparameters(const OptimizerOptions& options, size_t group) {
  require_optimizer("set_hyperparameters");
  Hyperparameters& hyperparameters = training_.step().known_hyperparameters();
  if (const OptimizerOptions& present = hyperparameters.of(group, "set_hyperparameters"); options.kind != present.kind)
    throw ConfigError(str("set_hyperparameters: group ", group, " is updated by ", optimizer_name(present.kind),
                          ", not by ", optimizer_name(options.kind), "; initialize() a new engine for that"));
  check_optimizer(options);
  require_states(options, group);
  hyperparameters.set(group, options);
}

std::pair<double, double> EngineBase::get_mom(size_t group) const {
  require_optimizer("get_mom");
  const Momentum momentum = momentum_of(training_.step().hyperparameters().of(group, "get_mom"));
  return {momentum.first, momentum.second};
}

void EngineBase::set_train_batch_size(int64_t train_batch_size) {
  training_.condition().require_alive("set_train_batch_size");
  const int64_t data_ranks = config().degrees.data;
  const int64_t round = train_micro_batch_size_per_gpu() * data_ranks;
  if (train_batch_size <= 0 || train_batch_size % round != 0)
    throw ConfigError(str("set_train_batch_size: ", train_batch_size, " is not a multiple of micro-batch ",
                          train_micro_batch_size_per_gpu(), " * ", data_ranks, " ranks = ", round),
                      ErrorCode::kBatchSize);
  training_.set_batch("set_train_batch_size", train_micro_batch_size_per_gpu(), train_batch_size / round);
}

void EngineBase::set_train_micro_batch_size(int64_t micro_batch_size) {
  training_.condition().require_alive("set_train_micro_batch_size");
  if (micro_batch_size < 1)
    throw ConfigError(str("set_train_micro_batch_size: ", micro_batch_size, " is no batch size; use 1 or more"),
                      ErrorCode::kBatchSize);
  training_.set_batch("set_train_micro_batch_size", micro_batch_size, gradient_accumulation_steps());
}

bool EngineBase::save_16bit_model(const std::filesystem::path& directory, const SaveModelOptions& options) {
  training_.export_weights(directory, options);
  return true;
}

void EngineBase::empty_partition_cache() {
  training_.condition().require_alive("empty_partition_cache");
  pager().release_gathered();
}

void EngineBase::offload_states(const OffloadOptions& options) {
  require_optimizer("offload_states");
  for (const std::string& state : options.include) {
    if (std::find(kOffloadable.begin(), kOffloadable.end(), state) != kOffloadable.end()) continue;
    std::string known;
    for (const char* name : kOffloadable) known += str(known.empty() ? "'" : ", '", name, "'");
    throw ConfigError(str("offload_states: include has '", state, "'; use ", known));
  }
  if (options.device != "cpu")
    throw ConfigError(str("offload_states: device='", options.device, "' is not there yet; use 'cpu'"),
                      ErrorCode::kUnsupported);
  if (!is_host(pager().device()))
    throw ConfigError(
        str("offload_states: states on ", pager().device().str(), " cannot be offloaded yet; leave the call out"),
        ErrorCode::kUnsupported);
  if (!std::exchange(has_explained_offload_, true) && training_.groups().model.rank() == 0)
    log(LogLevel::kInfo, "offload_states: all states of this engine are in host memory already; nothing moves");
}

int64_t EngineBase::optimizer_bytes() const {
  const ShardedOptimizer* const optimizer = training_.step().optimizer();
  return optimizer != nullptr ? optimizer->master_bytes() + optimizer->state_bytes() : 0;
}

void EngineBase::require_optimizer(const char* call) const {
  training_.condition().require_intact(call);
  if (training_.step().optimizer() == nullptr)
    throw StateError(
        str(call,
            ": no optimizer is configured, so nothing can be trained; add \"optimizer\": {\"type\": \"AdamW\", "
            "\"params\": {\"lr\": 1e-3}} to the configuration"));
}

}  // namespace trireme
