// An axis of ranks as a value: what the plan, its groups, its texts and its refusals know of pipelines, replicas,
// sequences, slices, … Each axis is a file of src/parallel/axes; besides, plan.cpp knows that "data" is replica ×
// shard.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/intercept.h"
#include "trireme/parallel/exclusions.h"
#include "trireme/topology.h"

namespace trireme {

struct ParallelOptions;

/// Gradients of the parameters that ranks along an axis have in common.
enum class SharedGradient : uint8_t {
  kParts,  ///< each rank's is a part of one sum
  kWhole,  ///< each rank's is all of it, and the same
};

/// A feature that does not go together with an axis, or with an option of the axis.
struct AxisExclusion {
  Feature other;
  /// "{}": values of the run. Where options alone decide: beside another axis both numbers of ranks, else the degree
  /// with its name, and the ranks along this axis.
  std::string text;
  std::optional<Feature> option = {};  ///< of this axis; nothing: the axis itself
  std::optional<EngineCall> at = {};   ///< as Exclusion::at
  ErrorCode code = ErrorCode::kUnsupported;
};

/// A pass over this rank's operators.
struct PlannedPass {
  PassOrder order;
  std::string name;
  std::vector<std::string> axes = {};  ///< along which it exchanges; empty: it is local
};

/// An axis of ranks. Along it, ranks
struct AxisPart {
  const char* name;
  bool shares_samples;                  ///< take the same samples
  bool shares_layers;                   ///< have the same layers, whole or slices of them
  bool shards_states;                   ///< have shards of the states of their parameters
  std::optional<SharedGradient> law;    ///< compute this of a gradient; nothing: they have no parameter in common
  const char* together = nullptr;       ///< do this together, as the plan prints it; null: not alone
  int Degrees::*degree = nullptr;       ///< are so many; null: as the topology says alone
  const char* member = nullptr;         ///< `degree` by its name
  const char* described = nullptr;      ///< in a sentence about a run; "{}": their number
  const char* mismatch = nullptr;       ///< text of an error where the topology says another number; "{}": the two
  std::optional<Feature> feature = {};  ///< the axis, in exclusions of other axes
  /// Exchange activations in this pass; null, or nothing: in none.
  std::optional<PlannedPass> (*pass)(const ParallelOptions&) = {};
  std::vector<AxisExclusion> exclusions = {};
};

/// All axes, the outermost first: the last varies fastest over the ranks of topology_of().
const std::vector<const AxisPart*>& all_axes();

// One file each.
const AxisPart& pipe_axis();
const AxisPart& replica_axis();
const AxisPart& shard_axis();
const AxisPart& sequence_axis();
const AxisPart& tensor_axis();
const AxisPart& model_axis();

}  // namespace trireme
