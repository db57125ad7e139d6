#include "trireme/parallel/exclusions.h"

#include "trireme/ownership/home.h"
#include "trireme/pager/layout/refusals.h"
#include "trireme/parallel/axis.h"
#include "trireme/parallel/plan.h"

namespace trireme {

namespace {

/// Features that options say; the others are the program's.
bool is_on(Feature feature, const ParallelOptions& options) {
  for (const AxisPart* axis : options.axes)
    if (axis->feature == feature) return axis->degree != nullptr && options.degrees.*axis->degree > 1;
  switch (feature) {
    case Feature::kUnsharded:
      return options.pager.stage == 0;
    case Feature::kStatesOverReplicas:
      return options.states_over_replicas;
    case Feature::kDeterministic:
      return options.pager.deterministic;
    case Feature::kOffload:
      return options.pager.offload_ratio > 0;
    case Feature::kWeightsOnDisk:
      return options.pager.disk.is_on();
    case Feature::kShardedTokens:
      return options.shards_tokens;
    case Feature::kAnySizes:
      return !options.takes_sizes_from_inputs;
    case Feature::kOwnership:
      return options.has_ownership;
    case Feature::kOwnershipOfAnySizes:
      return options.has_ownership && !options.takes_sizes_from_inputs;
    default:
      return false;
  }
}

/// The optimizer.
std::string at_a_time(const char* key, const char* what, const char* piece) {
  return str("zero_optimization.", key, ".device: \"nvme\" brings ", what, " ", piece, " by ", piece,
             ", and {} needs more than a ", piece,
             " at a time; use Adam, AdamW, Adagrad, Lion or SGD of the configuration, or the device \"cpu\"");
}
std::string unit_by_unit() { return at_a_time("offload_param", "weights", "unit"); }
std::string block_by_block() { return at_a_time("offload_optimizer", "states", "block"); }

}  // namespace

const std::vector<Exclusion>& exclusions() {
  using enum Feature;
  static const std::vector<Exclusion> others = {
      {kWeightsOnDisk, kDevice, kWeightsOnDiskOfDevice, EngineCall::kInitialize},
      {kWeightsOnDisk, kMatrixOptimizer, unit_by_unit(), EngineCall::kInitialize},
      {kWeightsOnDisk, kClientOptimizer, unit_by_unit(), EngineCall::kInitialize},
      {kStatesOnDisk, kMatrixOptimizer, block_by_block(), EngineCall::kInitialize},
      {kStatesOnDisk, kClientOptimizer, block_by_block(), EngineCall::kInitialize},
      {kSharedGather, kDevice, kSharedOnDevice, EngineCall::kInitialize, ErrorCode::kConfig},
      {kSharedGather, kSeparateMemory, kSharedWithoutMemory, EngineCall::kInitialize, ErrorCode::kConfig},
      {kParameterGroups, kClientOptimizer,
       "parameter_groups: {} of them beside a client_optimizer, which has its own; let the factory make them",
       EngineCall::kInitialize, ErrorCode::kConfig},
      {kDeterministic, kCoalesced, kReducedOnce, EngineCall::kBackward, ErrorCode::kState},
      {kOwnership, kNoSync, kNoScopeInSteps, EngineCall::kForward, ErrorCode::kState},
      {kOwnership, kCoalesced, kNoScopeInSteps, EngineCall::kForward, ErrorCode::kState},
      {kOwnership, kRecomputeLayers,
       "`trireme.recompute` = \"full\": a step function over {} stages does not run layers again yet; write "
       "\"selective\" or \"none\"",
       EngineCall::kInitialize, ErrorCode::kConfig},
      {kOwnership, kRecomputeByCall, kNoSecondRun, EngineCall::kBackward, ErrorCode::kState},
      {kOwnership, kInit,
       "'{}' was made under zero::Init, which has sharded it over all ranks; stages of a step function do not own such "
       "parameters yet: make the model outside of it",
       EngineCall::kInitialize},
  };
  static const std::vector<Exclusion> all = [] {
    std::vector<Exclusion> rows;
    for (const AxisPart* axis : all_axes())
      for (const AxisExclusion& row : axis->exclusions)
        rows.push_back({row.option.value_or(*axis->feature), row.other, row.text, row.at, row.code});
    rows.insert(rows.end(), others.begin(), others.end());
    return rows;
  }();
  return all;
}

const Exclusion* find_exclusion(Feature one, Feature other) {
  for (const Exclusion& row : exclusions())
    if ((row.one == one && row.other == other) || (row.one == other && row.other == one)) return &row;
  return nullptr;
}

const Exclusion& exclusion_of(Feature one, Feature other) {
  if (const Exclusion* const row = find_exclusion(one, other)) return *row;
  throw Error(ErrorCode::kInternal, str("no exclusion of features ", int(one), " and ", int(other)));
}

const AxisExclusion* first_exclusion(const AxisPart& axis, const ParallelOptions& options) {
  for (const AxisExclusion& row : axis.exclusions)
    if (!row.at && (!row.option || is_on(*row.option, options)) && is_on(row.other, options)) return &row;
  return nullptr;
}

}  // namespace trireme
