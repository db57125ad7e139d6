#include "trireme/plan/estimate.h"

#include "trireme/base/error.h"

namespace trireme {
namespace {

constexpr int kStages = 4;
constexpr int64_t kMasterBytes = 4;

void check(const EstimateOptions& options) {
  if (options.stage < 0 || options.stage >= kStages)
    throw ConfigError(str("ZeRO stage ", options.stage, "; expected an integer from 0 to 3"));
  if (options.world < 1) throw ConfigError(str("a world of ", options.world, " ranks; expected 1 or more"));
}

int64_t optimizer_bytes_per_parameter(const OptimizerOptions& optimizer) {
  return 4 * static_cast<int64_t>(optimizer_states(optimizer).size());
}

/// Elements that one rank holds of a state.
struct Held {
  int64_t whole = 0;
  int64_t shard = 0;
  /// A state is sharded from `stage` on.
  int64_t numel(const EstimateOptions& options, int stage) const { return options.stage >= stage ? shard : whole; }
};

ModelStates states_of(const Held& held, at::ScalarType weight_dtype, bool trainable, const EstimateOptions& options) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(weight_dtype));
  ModelStates states;
  states.weight_bytes = held.numel(options, 3) * itemsize;
  const int64_t master = trainable && weight_dtype != at::kFloat ? kMasterBytes : 0;
  const int64_t optimizer = trainable ? optimizer_bytes_per_parameter(options.optimizer) : 0;
  states.snapshot_bytes = held.shard * (itemsize + master + optimizer);
  if (!trainable) return states;
  states.gradient_bytes = held.numel(options, 2) * (options.accumulation_dtype == at::kFloat ? int64_t{4} : itemsize);
  states.master_bytes = held.numel(options, 1) * master;
  states.optimizer_bytes = held.numel(options, 1) * optimizer;
  return states;
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
                                                         .optimizer = request.optimizer}));
      result.rows.push_back(std::move(row));
    }
  }
  return result;
}

}  // namespace

ModelStates estimate_model_states(int64_t parameters, const EstimateOptions& options) {
  check(options);
  if (parameters < 0) throw ConfigError(str(parameters, " parameters; expected 0 or more"));
  const Held held{.whole = parameters, .shard = parameters / options.world + (parameters % options.world != 0 ? 1 : 0)};
  return states_of(held, options.weight_dtype, true, options);
}

ModelStates estimate_model_states(const Layout& layout, const EstimateOptions& options) {
  check(options);
  ModelStates sum;
  for (const UnitLayout& unit : layout.units) {
    const Held held{.whole = unit.numel(), .shard = unit.shard_numel};
    const ModelStates states = states_of(held, unit.dtype, unit.trainable, options);
    sum.weight_bytes += states.weight_bytes;
    sum.gradient_bytes += states.gradient_bytes;
    sum.master_bytes += states.master_bytes;
    sum.optimizer_bytes += states.optimizer_bytes;
    sum.snapshot_bytes += states.snapshot_bytes;
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
