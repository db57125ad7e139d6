// Checkpoints of a Training: what is saved, and how it comes back.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/log.h"
#include "trireme/base/state_names.h"
#include "trireme/checkpoint/async_save.h"
#include "trireme/checkpoint/training_values.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/optim/fields.h"
#include "trireme/training/training.h"

namespace trireme {

namespace {

void append(std::vector<TensorSlice>& to, std::vector<TensorSlice> from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

std::vector<bool> frozen_parameters(const Pager& pager) {
  std::vector<bool> frozen(pager.parameters().size());
  for (const OwnedSlice& slice : pager.owned_frozen())
    for (const ParameterPlace& placement : pager.layout().units[slice.unit].parameters) frozen[placement.index] = true;
  return frozen;
}

/// This rank's slices of the weights in the model's order, an empty one where it owns none of a weight: so a checkpoint
/// has that order too, and any rank tells the values of every parameter. `values` by parameter; empty: none.
void append_weights(StateTree& state, const Pager& pager, bool with_frozen, const std::vector<std::string>& values) {
  std::vector<std::vector<TensorSlice>> of_parameter(pager.parameters().size());
  const auto slice_of = [&](int index, int64_t begin, const at::Tensor& data, SliceStore* store) {
    const ParameterSpec& parameter = pager.parameters()[index];
    return TensorSlice{.name = weight_name(parameter.name),
                       .part = parameter.model_part(),
                       .begin = begin,
                       .data = store != nullptr ? at::Tensor() : data,
                       .store = store,
                       .values = values.empty() ? "" : values[index]};
  };
  for (const std::vector<OwnedSlice>& owned : {pager.owned(), pager.owned_frozen()})
    for (const OwnedSlice& slice : owned)
      for (const ParameterRange& range :
           ranges_of(pager.layout().units[slice.unit], slice.begin, slice.weights.numel()))
        of_parameter[range.parameter].push_back(
            slice_of(range.parameter, range.parameter_begin, slice.weights.narrow(0, range.slice_begin, range.numel),
                     slice.home == nullptr ? nullptr : slice.home->store(range.slice_begin, range.numel)));
  const std::vector<bool> frozen = frozen_parameters(pager);
  for (size_t i = 0; i < of_parameter.size(); ++i) {
    if (frozen[i] && !with_frozen) continue;
    const auto options = at::TensorOptions().dtype(pager.parameters()[i].dtype).device(pager.device());
    if (of_parameter[i].empty())
      of_parameter[i].push_back(slice_of(static_cast<int>(i), 0, at::empty({0}, options), nullptr));
    append(state.tensors, std::move(of_parameter[i]));
  }
}

/// The values that are saved with each weight, as JSON text; `optimizer` may be null. `first`: number of the first one
/// in the whole model.
std::vector<std::string> values_of_parameters(const Pager& pager, const ShardedOptimizer* optimizer,
                                              const std::map<std::string, std::string>& aliases, size_t first) {
  std::vector<ParameterValues> values(pager.parameters().size());
  const std::vector<int64_t> counts = optimizer ? optimizer->step_counts() : std::vector<int64_t>();
  for (size_t i = 0; i < counts.size(); ++i) {
    values[i].steps = counts[i];
    const int group = optimizer->group_of(static_cast<int>(i));
    if (group < 0 || !pager.parameters()[i].trainable) continue;
    values[i].group = group;
    values[i].position = static_cast<int>(first + i);
  }
  std::vector<std::string> texts;
  for (size_t i = 0; i < values.size(); ++i) {
    for (const auto& [alias, name] : aliases)
      if (name == pager.parameters()[i].name) values[i].aliases.push_back(alias);
    texts.push_back(to_text(values[i]));
  }
  return texts;
}

void bring_into_memory(TensorSlice& slice) {
  if (slice.store == nullptr) return;
  slice.data = at::empty({slice.store->numel()}, at::TensorOptions(slice.store->dtype()));
  slice.store->read({}, {static_cast<std::byte*>(slice.data.data_ptr()), slice.data.nbytes()});
  slice.store = nullptr;
}

/// The elements of `slice` that `parameter` counts, as a slice of the part that is counted: that keeps their order, so
/// they stand one behind the other there, too.
void keep_counted(TensorSlice& slice, const ParameterSpec& parameter) {
  bring_into_memory(slice);
  if (!parameter.is_counted) {
    slice.begin = 0;
    slice.data = slice.data.narrow(0, 0, 0);
    return;
  }
  const int64_t first = slice.begin, end = first + slice.data.numel();
  std::vector<at::Tensor> pieces;
  int64_t before = 0;  // how many of the counted elements stand before the slice
  for (const Interval& run : places_in(slice.part, parameter.counted)) {
    before += std::clamp<int64_t>(first - run.begin, 0, run.size());
    const int64_t from = std::max(run.begin, first), to = std::min(run.end, end);
    if (from < to) pieces.push_back(slice.data.narrow(0, from - first, to - from));
  }
  slice.part = parameter.counted;
  slice.begin = before;
  if (pieces.empty())
    slice.data = slice.data.narrow(0, 0, 0);
  else
    slice.data = pieces.size() == 1 ? pieces.front() : at::cat(pieces);
}

/// Elements that several ranks of a group that shares layers have are those of the rank that counts them.
void leave_to_others(StateTree& state, const Pager& pager) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  std::map<std::string, const ParameterSpec*, std::less<>> shared;
  for (const ParameterSpec& parameter : pager.parameters())
    if (!parameter.is_counted || !parameter.counted.shape.empty()) shared[parameter.name] = &parameter;
  for (TensorSlice& slice : state.tensors)
    if (const auto found = shared.find(parse_state_name(slice.name).parameter); found != shared.end())
      keep_counted(slice, *found->second);
}

/// Names of the weights that the checkpoint was saved without.
std::set<std::string> tensors_left_out(const Pager& pager, const TrainingValues& values) {
  std::set<std::string> names;
  if (!values.exclude_frozen_parameters.value_or(false)) return names;
  const std::vector<bool> frozen = frozen_parameters(pager);
  for (size_t i = 0; i < frozen.size(); ++i)
    if (frozen[i]) names.insert(weight_name(pager.parameters()[i].name));
  return names;
}

/// A value that the checkpoint must have: a missing one is named, not guessed.
template <class T>
T required(const std::optional<T>& value, const char* key) {
  if (!value)
    throw CheckpointError(str("checkpoint: expected the value '", key, "', found none; it was not saved by an engine"));
  return *value;
}

/// Whether the mode `low` saved it, in which 16-bit weights have no masters.
bool is_of_low(const TrainingValues& values) {
  if (!values.config) return false;
  const Json config = Json::parse(*values.config);
  const auto bf16 = config.find("bf16");
  return bf16 != config.end() && bf16->value("bf16_optimizer_states", false);
}

/// Masters that the checkpoint may have and this optimizer, in the mode `low`, has not: the weights are their rounded
/// values. As parts without elements, so that nothing of them is read.
std::vector<TensorSlice> unread_masters(const Pager& pager) {
  std::vector<TensorSlice> masters;
  for (const ParameterSpec& parameter : pager.parameters())
    if (parameter.trainable && parameter.dtype != at::kFloat)
      masters.push_back({master_name(parameter.name), parameter.model_part(), 0, at::empty({0}, at::kFloat)});
  return masters;
}

void check_has_progress(const TrainingValues& values) {
  (void)required(values.global_steps, "global_steps");
  (void)required(values.micro_steps, "micro_steps");
  (void)required(values.skipped_steps, "skipped_steps");
  (void)required(values.global_samples, "global_samples");
}

/// Step counts by parameter. A parameter that the checkpoint does not have keeps its own.
std::vector<int64_t> step_counts_of(const LoadedCheckpoint& loaded, const TrainingValues& values, const Pager& pager,
                                    std::vector<int64_t> counts) {
  const std::set<std::string> missing(loaded.missing.begin(), loaded.missing.end());
  for (size_t i = 0; i < counts.size(); ++i) {
    const ParameterSpec& parameter = pager.parameters()[i];
    if (const auto found = values.steps.find(parameter.name); found != values.steps.end())
      counts[i] = found->second;
    else if (parameter.trainable && !missing.contains(weight_name(parameter.name)))
      throw CheckpointError(str("checkpoint: expected the number of steps of \"", parameter.name,
                                "\", found none; load without optimizer states (load_optimizer_states=false)"));
  }
  return counts;
}

Json to_json(const OptimizerOptions& group) {
  Json json = Json::object();
  fields([&](const Field& field, auto own, auto) {
    if (field.place < 0)
      json[field.name] = group.*own;
    else
      json[field.name][field.place] = group.*own;
  });
  return json;
}

/// Takes over what `saved` has of a group's hyperparameters, but for the learning rate.
void take(OptimizerOptions& group, const Json& saved) {
  const double lr = group.lr;
  fields([&](const Field& field, auto own, auto) {
    const auto value = saved.find(field.name);
    if (value == saved.end()) return;
    if (field.place < 0)
      value->get_to(group.*own);
    else if (value->size() == 2)
      value->at(field.place).get_to(group.*own);
  });
  group.lr = lr;
}

/// Checkpoints are of host memory: what is on a device goes through a copy there.
StateTree host_copy(StateTree state) {
  const WithoutInterception own_operators;
  for (TensorSlice& slice : state.tensors)
    if (slice.store == nullptr) slice.data = slice.data.cpu();
  return state;
}

void copy_back(const StateTree& from, const StateTree& to) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < to.tensors.size(); ++i)
    if (to.tensors[i].store == nullptr && !from.tensors[i].data.is_same(to.tensors[i].data))
      to.tensors[i].data.copy_(from.tensors[i].data);
}

}  // namespace

StateTree Training::state(bool with_frozen, bool with_optimizer, const std::vector<std::string>& parameter_values) {
  ShardedOptimizer* const optimizer = step_->optimizer();
  StateTree state;
  append_weights(state, *pager_, with_frozen, parameter_values);
  if (optimizer && with_optimizer) append(state.tensors, optimizer->state());
  return state;
}

StateTree Training::saved_state(bool with_frozen) {
  StateTree state = this->state(with_frozen, /*with_optimizer=*/true,
                                values_of_parameters(*pager_, step_->optimizer(), aliases_, first_parameter_));
  if (groups_.slices != nullptr) leave_to_others(state, *pager_);
  // Buffers agree at every boundary; inside a window rank 0's count.
  if (groups_.stage.rank() == 0) append(state.tensors, buffers_->slices());
  return host_copy(std::move(state));
}

SavedCheckpoint Training::save(const std::filesystem::path& directory, const SaveCheckpointOptions& options) {
  condition_.require_intact("save_checkpoint");
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
                          .topology = groups_.plan.ranks.axes(),
                          .keep_last = options.keep_last.value_or(configured.keep_last),
                          .files = options.files};
  const std::string tag = options.tag.empty() ? str("global_step", step_->known_progress().global_steps) : options.tag;
  if (options.async_save.value_or(configured.async_save)) {
    if (!saver_) saver_ = std::make_unique<AsyncSaver>(groups_.model);
    return saver_->save(directory, tag, state, files);
  }
  (void)wait_for_save();
  return trireme::save_checkpoint(groups_.model, directory, tag, state, files);
}

std::optional<SavedCheckpoint> Training::wait_for_save() { return saver_ ? saver_->wait() : std::nullopt; }

std::optional<LoadedState> Training::load(const std::filesystem::path& directory,
                                          const LoadCheckpointOptions& options) {
  condition_.require_alive("load_checkpoint");
  const CallerScope caller("load_checkpoint");
  if (is_host(pager_->device())) groups_.model.barrier();  // a rank that is in another method is named here
  ShardedOptimizer* const optimizer = step_->optimizer();
  const bool loads_optimizer = optimizer != nullptr && options.load_optimizer_states && !options.load_module_only;
  StateTree state = this->state(/*with_frozen=*/true, loads_optimizer);
  const bool is_low = config_.precision.update_dtype != at::kFloat;
  if (loads_optimizer && is_low) append(state.tensors, unread_masters(*pager_));
  append(state.tensors, buffers_->slices());
  if (!options.load_module)
    std::erase_if(state.tensors, [](const TensorSlice& slice) {
      return parse_state_name(slice.name).kind != StateKind::kOptimizerState;
    });
  (void)wait_for_save();
  TrainingValues values;
  std::vector<int64_t> step_counts;
  LoadOptions load{.optional = [&](const LoadedCheckpoint& found) {
    values = parse_training_values(found.values, found.tensor_values);
    (void)required(values.client_state, "client_state");
    if (!options.load_module_only) check_has_progress(values);
    if (loads_optimizer) step_counts = step_counts_of(found, values, *pager_, optimizer->step_counts());
    std::set<std::string> not_needed = tensors_left_out(*pager_, values);
    const bool lacks_masters = is_low || is_of_low(values);
    for (const std::string& name : found.missing)
      if (lacks_masters && parse_state_name(name).kind == StateKind::kMaster) not_needed.insert(name);
    return not_needed;
  }};
  load.verify = options.verify.value_or(config_.checkpoint.verify);
  if (!options.load_module_strict) load.missing = Mismatch::kIgnore;
  if (!options.load_module || !options.load_module_strict || !loads_optimizer) load.extra = Mismatch::kIgnore;

  // Between closing and opening a window no peer reads weights, so they may be replaced.
  ClosedWindow window = pager_->close_window();
  window.meet();
  step_->restart_window();
  if (optimizer) optimizer->refresh_masters(window.written());
  for (const OwnedSlice& slice : pager_->owned()) pager_->await_owned(slice.unit);
  std::optional<LoadedCheckpoint> loaded;
  StateTree on_host = host_copy(state);
  try {
    loaded = trireme::load_checkpoint(groups_.model, directory, options.tag, on_host, load);
    if (loaded) copy_back(on_host, state);
  } catch (const CommError&) {
    throw;  // the group is dead, and with it every collective
  } catch (const Error& error) {
    // A device has not been written yet.
    const bool has_changed = std::any_of(state.tensors.begin(), state.tensors.end(), [](const TensorSlice& slice) {
      return slice.store != nullptr || is_host(slice.data);
    });
    if (error.code() == ErrorCode::kTornLoad && has_changed) condition_.tear(error.what());
    publish_all(window);  // every rank failed alike: nothing has changed, or a further load mends it
    throw;
  }
  condition_.mend();
  if (loaded && optimizer != nullptr) optimizer->match_masters(loads_optimizer, loaded->missing);
  publish_all(window);
  if (!loaded) {
    if (groups_.model.rank() == 0)
      log(LogLevel::kWarning,
          str("load_checkpoint: nothing to load in ", directory.string(), "; training starts anew"));
    return std::nullopt;
  }
  const auto left_out = std::count_if(loaded->missing.begin(), loaded->missing.end(), [](const std::string& name) {
    return parse_state_name(name).kind == StateKind::kWeight;
  });
  if (values.exclude_frozen_parameters.value_or(false) && left_out > 0 && groups_.model.rank() == 0)
    log(LogLevel::kInfo, str("load_checkpoint: '", loaded->tag, "' was saved without frozen parameters; the ", left_out,
                             " of this model stay as they are"));
  take_values(values, step_counts, options);
  const bool same_world = loaded->topology == groups_.plan.ranks.axes();
  if (!config_.pager.deterministic && same_world && !options.load_module_only)
    set_random_states(Json::parse(loaded->rank_values[groups_.model.rank()]), pager_->device());
  return LoadedState{loaded->tag, *values.client_state};
}

// Values that users wrote into weights since the last step count, for the masters too. Collective.
void Training::take_user_writes() {
  const std::vector<bool> written = pager_->settle_writes();
  if (step_->optimizer() != nullptr) step_->optimizer()->refresh_masters(written);
}

void Training::publish_all(ClosedWindow& window) {
  for (const OwnedSlice& slice : pager_->owned()) window.publish(slice.unit);
  for (const OwnedSlice& slice : pager_->owned_frozen()) window.publish(slice.unit);
  window.open();
  buffers_->accept();
}

std::string Training::values_text(const SaveCheckpointOptions& options) const {
  const TrainStepState state = step_->state();
  const std::vector<OptimizerOptions>& present = step_->hyperparameters().groups();
  TrainingValues values{.global_steps = state.progress.global_steps,
                        .micro_steps = state.progress.micro_steps,
                        .skipped_steps = state.progress.skipped_steps,
                        .global_samples = state.progress.global_samples,
                        .lr = present.empty() ? 0 : present.front().lr};
  for (const OptimizerOptions& group : present) values.group_lrs.push_back(group.lr);
  values.micro_batch_seed = state.micro_batch_seed;
  if (const auto& scaler = state.loss_scaler)
    values.loss_scaler = {scaler->scale, scaler->steps, scaler->last_overflow, scaler->hysteresis};
  values.exclude_frozen_parameters = options.exclude_frozen_parameters;
  if (step_->optimizer() != nullptr)
    for (const OptimizerOptions& group : present) values.groups.push_back({to_json(group).dump(), {}});
  values.config = to_json(config_).dump();
  values.client_state = parse_json(options.client_state, "save_checkpoint client_state", kSavedValues).dump();
  return to_text(values);
}

// Those of a checkpoint of other groups are left alone: take_values() says so.
void Training::take_hyperparameters(const TrainingValues& values) {
  Hyperparameters& hyperparameters = step_->known_hyperparameters();
  if (values.groups.size() != hyperparameters.groups().size()) return;
  for (size_t group = 0; group < values.groups.size(); ++group) {
    OptimizerOptions options = hyperparameters.groups()[group];
    if (options.kind == OptimizerKind::kClient) continue;
    take(options, Json::parse(values.groups[group].options));
    hyperparameters.set(group, options);
  }
}

void Training::take_values(const TrainingValues& values, const std::vector<int64_t>& step_counts,
                           const LoadCheckpointOptions& options) {
  if (options.load_module_only) return;
  const bool loads_optimizer = step_->optimizer() != nullptr && options.load_optimizer_states;
  TrainStepState state{.progress = {.micro_steps = *values.micro_steps,
                                    .global_steps = *values.global_steps,
                                    .skipped_steps = *values.skipped_steps,
                                    .global_samples = *values.global_samples}};
  state.micro_batch_seed = values.micro_batch_seed;
  // A checkpoint of a run that needed none leaves the scale as it is.
  if (const auto& saved = values.loss_scaler; loads_optimizer && step_->loss_scale() && saved)
    state.loss_scaler = {saved->scale, saved->steps, saved->last_overflow, saved->hysteresis};
  step_->resume(state);
  if (loads_optimizer) take_hyperparameters(values);
  if (options.load_lr_scheduler_states) {
    const std::vector<double> rates =
        values.group_lrs.empty() ? std::vector<double>{required(values.lr, "lr")} : values.group_lrs;
    const int64_t applied_steps = state.progress.global_steps - state.progress.skipped_steps;
    const bool fits = step_->known_hyperparameters().resume(applied_steps, rates);
    const size_t groups = step_->known_hyperparameters().groups().size();
    if (!fits && groups > 0)
      log(LogLevel::kWarning,
          str("load_checkpoint: the checkpoint has ", rates.size(), " parameter groups, this engine ", groups,
              "; the learning rates are those of its schedule"));
  }
  if (loads_optimizer) step_->optimizer()->set_step_counts(step_counts);
}

}  // namespace trireme
