#include "trireme/parallel/exclusions.h"

#include "trireme/pager/layout/refusals.h"
#include "trireme/parallel/plan.h"
#include "trireme/sequence/refusals.h"

namespace trireme {

namespace {

/// Features that options say; the others are the program's.
bool is_on(Feature feature, const ParallelOptions& options) {
  switch (feature) {
    case Feature::kUnsharded:
      return options.pager.stage == 0;
    case Feature::kReplicas:
      return options.degrees.replicas > 1;
    case Feature::kStatesOverReplicas:
      return options.degrees.replicas > 1 && options.states_over_replicas;
    case Feature::kDeterministic:
      return options.pager.deterministic;
    case Feature::kOffload:
      return options.pager.offload_ratio > 0;
    case Feature::kWeightsOnDisk:
      return options.pager.disk.is_on();
    case Feature::kPipeline:
      return options.degrees.pipe > 1;
    case Feature::kSequence:
      return options.degrees.sequence > 1;
    case Feature::kTensor:
      return options.degrees.tensor > 1;
    case Feature::kShardedTokens:
      return options.degrees.tensor > 1 && options.shards_tokens;
    default:
      return false;
  }
}

/// The key or the degree and its value, the number of replicas, the other feature and why not.
std::string beside_replicas(const char* other, const char* why) {
  return str("{} makes {} replicas beside ", other, ", ", why, "; leave one of the two out");
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
  static const std::vector<Exclusion> all = {
      {kReplicas, kUnsharded, beside_replicas("ZeRO stage 0", "which shards nothing")},
      {kReplicas, kDeterministic, beside_replicas("`deterministic`", "whose sums would depend on their number")},
      {kStatesOverReplicas, kOffload, beside_replicas("offloading", "and states over replicas stay on the device")},
      {kStatesOverReplicas, kWeightsOnDisk,
       beside_replicas("`offload_param` on disk", "which is not there yet with states over replicas")},
      {kSequence, kTensor,
       "axes \"sequence\" of {} and \"tensor\" of {} ranks: layers in slices do not take parts of sequences yet; make "
       "one of the two 1"},
      {kPipeline, kSequence,
       "axes \"pipe\" of {} and \"sequence\" of {} ranks: a pipeline does not send parts of sequences yet; make one of "
       "the two 1"},
      {kPipeline, kShardedTokens,
       "tensor_parallel.sequence_parallel: a pipeline does not send parts of sequences yet; remove the key, or make "
       "stages 1"},
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
      {kRecomputeLayers, kPipeline, kNoLayers, EngineCall::kInitialize, ErrorCode::kConfig},
      {kLeafModules, kPipeline, kNoLeafModule, EngineCall::kInitialize, ErrorCode::kConfig},
      {kTensor, kMatrixOptimizer,
       "optimizer {} looks at whole parameters, and with tensor_parallel (autotp_size={}) a rank has slices; use "
       "another optimizer, such as AdamW",
       EngineCall::kInitialize},
      {kRecomputeByCall, kSequence, kMadeByLength, EngineCall::kForward, ErrorCode::kState},
      {kRingAttention, kDevice, kRingRefusal, EngineCall::kForward, ErrorCode::kState},
      {kDeterministic, kCoalesced, kReducedOnce, EngineCall::kBackward, ErrorCode::kState},
      {kPipeline, kNoSync, kNoScope, EngineCall::kForward, ErrorCode::kState},
      {kPipeline, kCoalesced, kNoScope, EngineCall::kForward, ErrorCode::kState},
  };
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

const Exclusion* first_exclusion(const ParallelOptions& options) {
  for (const Exclusion& row : exclusions())
    if (!row.at && is_on(row.one, options) && is_on(row.other, options)) return &row;
  return nullptr;
}

}  // namespace trireme
