// Data-parallel ranks: the axis "data" of a topology is "replica" × "shard".
#include "trireme/base/error.h"
#include "trireme/parallel/axis.h"

namespace trireme {

namespace {

/// The degree with its name, the number of replicas, the other feature and why not.
std::string beside_replicas(const char* other, const char* why) {
  return str("{} makes {} replicas beside ", other, ", ", why, "; leave one of the two out");
}

}  // namespace

const AxisPart& replica_axis() {
  using enum Feature;
  static const AxisPart axis = {
      .name = "replica",
      .shares_samples = false,
      .shares_layers = true,
      .shards_states = false,
      .law = SharedGradient::kParts,
      .together = "hold the same shards",
      .degree = &Degrees::replicas,
      .member = "degrees.replicas",
      .described = "{} replicas",
      .feature = kReplicas,
      .exclusions = {
          {kUnsharded, beside_replicas("ZeRO stage 0", "which shards nothing")},
          {kDeterministic, beside_replicas("`deterministic`", "whose sums would depend on their number")},
          {kOffload, beside_replicas("offloading", "and states over replicas stay on the device"), kStatesOverReplicas},
          {kWeightsOnDisk,
           beside_replicas("`offload_param` on disk", "which is not there yet with states over replicas"),
           kStatesOverReplicas},
      }};
  return axis;
}

const AxisPart& shard_axis() {
  static const AxisPart axis = {.name = "shard",
                                .shares_samples = false,
                                .shares_layers = true,
                                .shards_states = true,
                                .law = SharedGradient::kParts};
  return axis;
}

}  // namespace trireme
