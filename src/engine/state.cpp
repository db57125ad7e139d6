// What a checkpoint holds of an engine, and how it comes back.
#include <algorithm>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/log.h"
#include "trireme/checkpoint/async_save.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/stream.h"
#include "trireme/engine/engine.h"
#include "trireme/intercept.h"
#include "trireme/intercept/random_streams.h"

namespace trireme {

namespace {

void append(std::vector<TensorSlice>& to, std::vector<TensorSlice> from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

void append_weights(StateTree& state, const Pager& pager, const std::vector<OwnedSlice>& owned) {
  for (const OwnedSlice& slice : owned)
    for (const Portion& portion : portions_of(pager.layout().units[slice.unit], slice.begin, slice.weights.numel())) {
      const ParameterSpec& parameter = pager.parameters()[portion.parameter];
      state.tensors.push_back({"model." + parameter.name, parameter.shape, portion.parameter_begin,
                               slice.weights.narrow(0, portion.slice_begin, portion.numel)});
    }
}

/// Names of the weights that a checkpoint with such values was saved without.
std::set<std::string> tensors_left_out(const Pager& pager, const std::string& values) {
  std::set<std::string> names;
  if (!Json::parse(values).value("exclude_frozen_parameters", false)) return names;
  for (const OwnedSlice& slice : pager.owned_frozen())
    for (const Placement& placement : pager.layout().units[slice.unit].parameters)
      names.insert("model." + pager.parameters()[placement.index].name);
  return names;
}

/// Values that the checkpoint must have: a missing one is named, not guessed.
template <class T>
T required(const Json& json, const char* key) {
  const auto found = json.find(key);
  if (found == json.end())
    throw CheckpointError(str("checkpoint: expected the value '", key, "', found none; it was not saved by an engine"));
  return found->get<T>();
}

Json to_json(const LossScaler::State& state) {
  return {{"scale", state.scale},
          {"steps", state.steps},
          {"last_overflow", state.last_overflow},
          {"hysteresis", state.hysteresis}};
}

Json to_json(const OptimizerOptions& group) {
  return {{"lr", group.lr},
          {"betas", {group.beta1, group.beta2}},
          {"eps", group.eps},
          {"weight_decay", group.weight_decay},
          {"momentum", group.momentum},
          {"nesterov", group.nesterov},
          {"min_coeff", group.min_coeff},
          {"max_coeff", group.max_coeff},
          {"bias_correction", group.bias_correction},
          {"ns_steps", group.ns_steps},
          {"names", Json::array()}};
}

/// Takes over what `saved` has of a group's hyperparameters, but for the learning rate.
void take(OptimizerOptions& group, const Json& saved) {
  const auto betas = saved.value("betas", std::vector<double>{});
  if (betas.size() == 2) {
    group.beta1 = betas[0];
    group.beta2 = betas[1];
  }
  group.eps = saved.value("eps", group.eps);
  group.weight_decay = saved.value("weight_decay", group.weight_decay);
  group.momentum = saved.value("momentum", group.momentum);
  group.nesterov = saved.value("nesterov", group.nesterov);
  group.min_coeff = saved.value("min_coeff", group.min_coeff);
  group.max_coeff = saved.value("max_coeff", group.max_coeff);
  group.bias_correction = saved.value("bias_correction", group.bias_correction);
  group.ns_steps = saved.value("ns_steps", group.ns_steps);
}

LossScaler::State scaler_state(const Json& json) {
  return {required<double>(json, "scale"), required<int64_t>(json, "steps"), required<int64_t>(json, "last_overflow"),
          required<int64_t>(json, "hysteresis")};
}

/// Checkpoints are of host memory: what is on a device goes through a copy there.
StateTree host_copy(StateTree state) {
  const WithoutInterception own_operators;
  for (TensorSlice& slice : state.tensors) slice.data = slice.data.cpu();
  return state;
}

void copy_back(const StateTree& from, const StateTree& to) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < to.tensors.size(); ++i)
    if (!from.tensors[i].data.is_same(to.tensors[i].data)) to.tensors[i].data.copy_(from.tensors[i].data);
}

}  // namespace

StateTree Engine::state(bool with_frozen, bool with_optimizer) {
  StateTree state;
  append_weights(state, *pager_, pager_->owned());
  if (with_frozen) append_weights(state, *pager_, pager_->owned_frozen());
  if (optimizer_ && with_optimizer) append(state.tensors, optimizer_->state());
  return state;
}

StateTree Engine::saved_state(bool with_frozen) {
  StateTree state = this->state(with_frozen, /*with_optimizer=*/true);
  // Buffers agree at every boundary; inside a window rank 0's count.
  if (group_.rank() == 0) append(state.tensors, buffers_->slices());
  return host_copy(std::move(state));
}

SavedCheckpoint Engine::save_checkpoint(const std::filesystem::path& directory, const SaveCheckpointOptions& options) {
  require_intact("save_checkpoint");
  const CallerScope caller("save_checkpoint");
  if (directory.empty())
    throw ConfigError("save_checkpoint: the directory is empty; name the folder that holds the checkpoints");
  take_user_writes();
  StateTree state = saved_state(!options.exclude_frozen_parameters);
  state.values = values_text(options);
  state.rank_values = Json(random_states(pager_->device())).dump();
  const CheckpointOptions& configured = config_.checkpoint;
  const SaveOptions files{.latest = options.latest,
                          .tags = configured.tag_validation,
                          .keep_last = options.keep_last.value_or(configured.keep_last),
                          .files = options.files};
  const std::string tag = options.tag.empty() ? str("global_step", global_steps()) : options.tag;
  if (options.async_save.value_or(configured.async_save)) {
    if (!saver_) saver_ = std::make_unique<AsyncSaver>(group_);
    return saver_->save(directory, tag, state, files);
  }
  (void)wait_for_checkpoint();
  return trireme::save_checkpoint(group_, directory, tag, state, files);
}

std::optional<SavedCheckpoint> Engine::wait_for_checkpoint() { return saver_ ? saver_->wait() : std::nullopt; }

std::optional<LoadedState> Engine::load_checkpoint(const std::filesystem::path& directory,
                                                   const LoadCheckpointOptions& options) {
  require_alive("load_checkpoint");
  const CallerScope caller("load_checkpoint");
  if (is_host(pager_->device())) group_.barrier();  // a rank that is in another method is named here
  const bool loads_optimizer = optimizer_ && options.load_optimizer_states && !options.load_module_only;
  StateTree state = this->state(/*with_frozen=*/true, loads_optimizer);
  append(state.tensors, buffers_->slices());
  if (!options.load_module)
    std::erase_if(state.tensors, [](const TensorSlice& slice) { return !slice.name.starts_with("optimizer."); });
  (void)wait_for_checkpoint();
  LoadOptions load{.optional = [this](const std::string& values) { return tensors_left_out(*pager_, values); }};
  load.verify = options.verify.value_or(config_.checkpoint.verify);
  if (!options.load_module_strict) load.missing = Mismatch::kIgnore;
  if (!options.load_module || !options.load_module_strict || !loads_optimizer) load.extra = Mismatch::kIgnore;

  // Between closing and opening a window no peer reads weights, so they may be replaced.
  ClosedWindow window = pager_->close_window();
  window.meet();
  step_->restart_window();
  if (optimizer_) optimizer_->refresh_masters(window.written());
  for (const OwnedSlice& slice : pager_->owned()) pager_->await_owned(slice.unit);
  std::optional<LoadedCheckpoint> loaded;
  StateTree on_host = host_copy(state);
  try {
    loaded = trireme::load_checkpoint(group_, directory, options.tag, on_host, load);
    if (loaded) copy_back(on_host, state);
  } catch (const CommError&) {
    throw;  // the group is dead, and with it every collective
  } catch (const Error& error) {
    // A device has not been written yet.
    const bool has_changed = std::any_of(state.tensors.begin(), state.tensors.end(),
                                         [](const TensorSlice& slice) { return is_host(slice.data); });
    if (error.code() == ErrorCode::kTornLoad && has_changed) torn_load_ = error.what();
    publish_all(window);  // every rank failed alike: nothing has changed, or a further load mends it
    throw;
  }
  torn_load_.clear();
  if (loaded && optimizer_) optimizer_->match_masters(loads_optimizer, loaded->missing);
  publish_all(window);
  if (!loaded) {
    if (group_.rank() == 0)
      log(LogLevel::kWarning,
          str("load_checkpoint: nothing to load in ", directory.string(), "; training starts anew"));
    return std::nullopt;
  }
  if (const size_t kept = load.optional(loaded->values).size(); kept > 0 && group_.rank() == 0)
    log(LogLevel::kInfo, str("load_checkpoint: '", loaded->tag, "' was saved without frozen parameters; the ", kept,
                             " of this model stay as they are"));
  take_values(loaded->values, options);
  const bool same_world = loaded->rank_values.size() == static_cast<size_t>(group_.size());
  if (!config_.pager.deterministic && same_world && !options.load_module_only)
    set_random_states(Json::parse(loaded->rank_values[group_.rank()]), pager_->device());
  return LoadedState{loaded->tag, required<Json>(Json::parse(loaded->values), "client_state").dump()};
}

// What users wrote into weights since the last step counts, for the masters too. Collective.
void Engine::take_user_writes() {
  const std::vector<bool> written = pager_->settle_writes();
  if (optimizer_) optimizer_->refresh_masters(written);
}

void Engine::publish_all(ClosedWindow& window) {
  for (const OwnedSlice& slice : pager_->owned()) window.publish(slice.unit);
  for (const OwnedSlice& slice : pager_->owned_frozen()) window.publish(slice.unit);
  window.open();
  buffers_->accept();
}

std::string Engine::values_text(const SaveCheckpointOptions& options) const {
  Json values;
  const TrainStepState state = step_->state();
  const std::vector<OptimizerOptions>& present = step_->hyperparameters().groups();
  values["global_steps"] = state.progress.global_steps;
  values["micro_steps"] = state.progress.micro_steps;
  values["skipped_steps"] = state.progress.skipped_steps;
  values["global_samples"] = state.progress.global_samples;
  values["lr"] = get_lr();
  for (const OptimizerOptions& group : present) values["group_lrs"].push_back(group.lr);
  if (state.micro_batch_seed) values["micro_batch_seed"] = *state.micro_batch_seed;
  if (state.loss_scaler) values["loss_scaler"] = to_json(*state.loss_scaler);
  values["aliases"] = aliases_;
  values["exclude_frozen_parameters"] = options.exclude_frozen_parameters;
  if (optimizer_) {
    const std::vector<int64_t> counts = optimizer_->step_counts();
    Json& steps = values["parameter_steps"];
    for (size_t i = 0; i < counts.size(); ++i) steps[pager_->parameters()[i].name] = counts[i];
    Json& groups = values["parameter_groups"] = Json::array();
    for (const OptimizerOptions& group : present) groups.push_back(to_json(group));
    for (size_t i = 0; i < counts.size(); ++i)
      if (const int group = optimizer_->group_of(static_cast<int>(i)); group >= 0 && pager_->parameters()[i].trainable)
        groups[group]["names"].push_back(pager_->parameters()[i].name);
  }
  values["config"] = to_json(config_);
  values["client_state"] = parse_json(options.client_state, "save_checkpoint client_state");
  return values.dump();
}

// Those of a checkpoint of other groups are left alone: take_values() says so.
void Engine::take_hyperparameters(const std::string& values) {
  const Json saved = Json::parse(values).value("parameter_groups", Json::array());
  Hyperparameters& hyperparameters = step_->known_hyperparameters();
  if (saved.size() != hyperparameters.groups().size()) return;
  for (size_t group = 0; group < saved.size(); ++group) {
    OptimizerOptions options = hyperparameters.groups()[group];
    if (options.kind == OptimizerKind::kClient) continue;
    take(options, saved[group]);
    hyperparameters.set(group, options);
  }
}

void Engine::take_values(const std::string& text, const LoadCheckpointOptions& options) {
  if (options.load_module_only) return;
  const Json values = Json::parse(text);
  const bool loads_optimizer = optimizer_ && options.load_optimizer_states;
  TrainStepState state{.progress = {.micro_steps = required<int64_t>(values, "micro_steps"),
                                    .global_steps = required<int64_t>(values, "global_steps"),
                                    .skipped_steps = required<int64_t>(values, "skipped_steps"),
                                    .global_samples = required<int64_t>(values, "global_samples")}};
  if (values.contains("micro_batch_seed")) state.micro_batch_seed = values["micro_batch_seed"].get<uint64_t>();
  // A checkpoint of a run that needed none leaves the scale as it is.
  if (loads_optimizer && step_->loss_scale() && values.contains("loss_scaler"))
    state.loss_scaler = scaler_state(values["loss_scaler"]);
  step_->resume(state);
  if (loads_optimizer) take_hyperparameters(text);
  if (options.load_lr_scheduler_states) {
    const auto rates = values.value("group_lrs", std::vector<double>{required<double>(values, "lr")});
    const int64_t applied_steps = state.progress.global_steps - state.progress.skipped_steps;
    const bool fits = step_->known_hyperparameters().resume(applied_steps, rates);
    if (!fits && group_count() > 0)
      log(LogLevel::kWarning,
          str("load_checkpoint: the checkpoint has ", rates.size(), " parameter groups, this engine ", group_count(),
              "; the learning rates are those of its schedule"));
  }
  if (!loads_optimizer) return;
  const auto steps = values.value("parameter_steps", std::map<std::string, int64_t>{});
  std::vector<int64_t> counts;
  for (const ParameterSpec& parameter : pager_->parameters()) {
    const auto found = steps.find(parameter.name);
    counts.push_back(found == steps.end() ? 0 : found->second);
  }
  optimizer_->set_step_counts(counts);
}

}  // namespace trireme
