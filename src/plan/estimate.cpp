#include "trireme/plan/estimate.h"

#include <cmath>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/pager/layout/policy.h"

namespace trireme {
namespace {

constexpr int kStages = 4;

void check(const EstimateOptions& options) {
  if (options.stage < 0 || options.stage >= kStages)
    throw ConfigError(str("ZeRO stage ", options.stage, "; expected an integer from 0 to 3"));
  if (options.world < 1) throw ConfigError(str("a world of ", options.world, " ranks; expected 1 or more"));
  if (!(options.offload_ratio >= 0 && options.offload_ratio <= 1))
    throw ConfigError(str("an offload ratio of ", options.offload_ratio, "; expected a number from 0 to 1"));
  if (options.offload_ratio > 0 && options.on_disk != KeptOnDisk::kNothing)
    throw ConfigError(
        "states on disk are estimated for models on hosts, from where nothing is offloaded; leave one out");
}

/// Elements that one rank holds of a state.
struct Held {
  int64_t whole = 0;
  int64_t shard = 0;
  /// A state is sharded from `stage` on.
  int64_t numel(const EstimateOptions& options, int stage) const { return options.stage >= stage ? shard : whole; }
};

ModelStates states_of(const Held& held, at::ScalarType weight_dtype, bool trainable, bool offloaded,
                      const EstimateOptions& options) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(weight_dtype));
  ModelStates states;
  states.weight_bytes = held.numel(options, 3) * itemsize;
  const bool has_master = weight_dtype != at::kFloat && weight_dtype != options.update_dtype;
  const auto updated_itemsize = has_master ? static_cast<int64_t>(sizeof(float)) : itemsize;
  const int64_t master = trainable && has_master ? updated_itemsize : 0;
  const auto states_per_weight = static_cast<int64_t>(optimizer_states(options.optimizer).size());
  const int64_t optimizer = trainable ? updated_itemsize * states_per_weight : 0;
  states.snapshot_bytes = held.shard * (itemsize + master + optimizer);
  const int64_t gradient = !trainable ? 0 : options.accumulation_dtype == at::kFloat ? int64_t{4} : itemsize;
  const bool keeps_shard = options.offload_parameters && options.offload_ratio > 0 && options.stage == 3;
  if (options.stage > 0 && (trainable ? offloaded : keeps_shard)) {
    states.host_bytes = held.shard * (itemsize + gradient + master + optimizer);
    if (keeps_shard) states.weight_bytes = 0;
    return states;
  }
  // Where some gradients leave for the host, all are reduced during backward.
  states.gradient_bytes = held.numel(options, options.offload_ratio > 0 ? 1 : 2) * gradient;
  states.master_bytes = held.numel(options, 1) * master;
  states.optimizer_bytes = held.numel(options, 1) * optimizer;
  const auto move_to_disk = [&](int64_t& bytes) { states.disk_bytes += std::exchange(bytes, 0); };
  if (options.on_disk != KeptOnDisk::kNothing) {
    move_to_disk(states.master_bytes);
    move_to_disk(states.optimizer_bytes);
  }
  if (options.on_disk == KeptOnDisk::kStatesAndWeights && options.stage == 3) move_to_disk(states.weight_bytes);
  return states;
}

void add(ModelStates& sum, const ModelStates& states) {
  sum.weight_bytes += states.weight_bytes;
  sum.gradient_bytes += states.gradient_bytes;
  sum.master_bytes += states.master_bytes;
  sum.optimizer_bytes += states.optimizer_bytes;
  sum.host_bytes += states.host_bytes;
  sum.disk_bytes += states.disk_bytes;
  sum.snapshot_bytes += states.snapshot_bytes;
}

Held held_of(int64_t parameters, int world) {
  return {.whole = parameters, .shard = parameters / world + (parameters % world != 0 ? 1 : 0)};
}

template <class StatesOf>
Estimate tabulate(int64_t parameters, const EstimateRequest& request, StatesOf states_of) {
  Estimate result{.parameters = parameters, .request = request, .rows = {}};
  for (int world : request.worlds) {
    for (at::ScalarType accumulation : request.accumulation_dtypes) {
      if (c10::elementSize(accumulation) < c10::elementSize(request.weight_dtype)) continue;
      EstimateRow row{.world = world, .accumulation_dtype = accumulation, .by_stage = {}};
      for (int stage = 0; stage < kStages; ++stage)
        row.by_stage.push_back(states_of(EstimateOptions{.stage = stage,
                                                         .world = world,
                                                         .weight_dtype = request.weight_dtype,
                                                         .accumulation_dtype = accumulation,
                                                         .update_dtype = request.update_dtype,
                                                         .optimizer = request.optimizer,
                                                         .offload_ratio = request.offload_ratio,
                                                         .offload_parameters = request.offload_parameters,
                                                         .on_disk = request.on_disk}));
      result.rows.push_back(std::move(row));
    }
  }
  return result;
}

}  // namespace

ModelStates estimate_model_states(int64_t parameters, const EstimateOptions& options) {
  check(options);
  if (parameters < 0) throw ConfigError(str(parameters, " parameters; expected 0 or more"));
  const auto offloaded = std::llround(options.offload_ratio * static_cast<double>(parameters));
  ModelStates sum;
  for (const bool on_host : {true, false})
    add(sum, states_of(held_of(on_host ? offloaded : parameters - offloaded, options.world), options.weight_dtype, true,
                       on_host, options));
  return sum;
}

ModelStates estimate_model_states(const Layout& layout, const EstimateOptions& options) {
  check(options);
  const std::vector<bool> offloaded = offloaded_units(layout, options.offload_ratio);
  ModelStates sum;
  for (size_t i = 0; i < layout.units.size(); ++i) {
    const UnitLayout& unit = layout.units[i];
    const Held held{.whole = unit.numel(), .shard = unit.shard_numel};
    add(sum, states_of(held, unit.dtype, unit.trainable, offloaded[i], options));
  }
  return sum;
}

Estimate estimate(int64_t parameters, const EstimateRequest& request) {
  return tabulate(parameters, request,
                  [&](const EstimateOptions& options) { return estimate_model_states(parameters, options); });
}

Estimate estimate(const std::vector<ParameterSpec>& parameters, const EstimateRequest& request,
                  const UnitRules& rules) {
  int64_t count = 0;
  for (const ParameterSpec& parameter : parameters) count += parameter.numel();
  return tabulate(count, request, [&](const EstimateOptions& options) {
    check(options);
    return estimate_model_states(make_layout(parameters, options.world, rules), options);
  });
}

}  // namespace trireme
