// The plan of all axes as one pure value: the effect of each axis on parameters, gradients, passes, groups and samples.
//
//   const ParallelOptions options{.degrees = degrees, .pager = {.stage = 3}};
//   const ParallelPlan plan = make_plan(topology_of(degrees, 8), /*rank=*/3, options);
//   plan.shards.of(3);  // the ranks that hold the other shards of rank 3's parameters
//   plan.mean_over;     // the divisor of their gradients' sum
//
// No process, device, tensor or Group. The engine makes its groups by it, `trireme plan` prints it, and tests hold it
// against closed forms.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/tensor_part.h"
#include "trireme/comm/group.h"
#include "trireme/pager/layout/layout.h"
#include "trireme/pager/layout/policy.h"
#include "trireme/parallel/axis.h"
#include "trireme/sequence/sequence_parallel.h"
#include "trireme/topology.h"

namespace trireme {

/// The options of all modules on which axes depend.
struct ParallelOptions {
  Degrees degrees = {};
  PagerPolicy pager = {};
  bool states_over_replicas = false;  ///< ShardMesh::states_over_replicas
  SequenceAttention sequence_attention = SequenceAttention::kUlysses;
  bool shards_tokens = false;            ///< TensorParallelOptions::sequence_parallel
  bool takes_sizes_from_inputs = false;  ///< TrainingOptions::takes_sizes_from_inputs
  bool recomputes_selectively = false;
  bool computes_in_tiles = false;
  bool has_ownership = false;  ///< stages own parts of an unmodified model: Ownership
  std::vector<const AxisPart*> axes = all_axes();
};

/// The ranks of a run, grouped along some axes. Every rank is in exactly one group.
struct RankGroups {
  std::vector<std::string> axes;        ///< of ParallelPlan::topology; empty: each rank is a group of its own
  std::vector<std::vector<int>> ranks;  ///< each group ascends, in the order of their first ranks

  int size() const { return static_cast<int>(ranks.front().size()); }
  const std::vector<int>& of(int rank) const;
};

/// An axis of the run, and where this rank stands on it.
struct PlannedAxis {
  const AxisPart* part;
  int size = 1;
  int position = 0;
  RankGroups groups = {};  ///< ranks that differ in their position on it alone
};

/// One parameter under the plan.
struct PlannedParameter {
  std::string name;
  bool trainable = true;
  /// Axes over which its weights, its gradient, and its masters and optimizer states are sharded; none: every rank has
  /// them whole. A frozen parameter has no gradient and no states.
  std::vector<std::string> weights_over, gradient_over, states_over;
  /// Elements of the flattened parameter (of this rank's slice under tensor parallelism): `held` are those whose
  /// weights this rank keeps between two uses, `updated` those that it updates. The ranks along `weights_over` hold,
  /// and those along `states_over` update, each element once.
  Interval held, updated;
  /// Axes along which ranks' gradients are parts of one sum.
  std::vector<std::string> gradient_sum;
  int64_t mean_over = 1;  ///< by which that sum is divided
  std::string why;        ///< the rule that decided this
};

/// The plan, as one rank sees it. Groups follow from what AxisPart says of axes.
struct ParallelPlan {
  Topology ranks;     ///< as given
  Topology topology;  ///< with "replica" and "shard" in the place of "data"
  int rank = 0;
  std::vector<PlannedAxis> axes = {};  ///< of `topology`, in its order

  RankGroups model = {};   ///< all ranks: they step together
  RankGroups stage = {};   ///< the ranks that have the same layers, whole or slices of them
  RankGroups sums = {};    ///< within `stage`: the ranks whose gradients are parts of one sum
  RankGroups shards = {};  ///< within `sums`: the ranks that hold all shards of the parameters together

  RankGroups slices = {};  ///< within `stage`: the ranks that have slices of layers, and whole gradients of the rest
  RankGroups stages = {};  ///< the ranks that have no parameter in common: one of each stage
  RankGroups alone = {};   ///< each rank by itself

  DataPlace place = {};  ///< of this rank's samples
  ReduceOp reduce_op = ReduceOp::kMean;
  int64_t mean_over = 1;                 ///< ShardMesh::mean_over
  bool states_over_replicas = false;     ///< ShardMesh::states_over_replicas
  std::vector<PlannedPass> passes = {};  ///< outermost first
  std::vector<PlannedParameter> parameters = {};

  int size_of(std::string_view axis) const { return topology.size_of(axis); }
  /// Ranks that differ in their position on `axis` alone; of an axis that is not there each rank is a group of its own.
  const RankGroups& along(std::string_view axis) const;
};

/// The topology of a job of `world` ranks by its degrees: the axes "pipe", "data", "sequence" and "tensor", the last
/// varying fastest; those of degree 1 are left out, except "data". If they do not multiply to `world`, all ranks are
/// data-parallel; make_plan() refuses such degrees.
Topology topology_of(const Degrees& degrees, int world);

/// A topology of the axes "data", "pipe" and "tensor" from the placement strategy of SageMaker's smp: the letters D, P
/// and T in any order, the right-most varying fastest over ranks, or "cluster" (DPT: a model stays on neighbouring
/// ranks) or "spread" (TPD).
/// Throws    ConfigError: anything else, naming what is accepted.
Topology place(std::string_view strategy, const Degrees& degrees);

/// The plan for rank `rank` of `ranks` and for `parameters`: those of its stage, or of all stages (to print them).
///
/// Throws    ConfigError: an axis that is not there yet and longer than 1; degrees that are not those of `ranks`;
///           replicas that do not divide "data"; two features that exclude each other (exclusions()), where options
///           tell.
ParallelPlan make_plan(const Topology& ranks, int rank, const ParallelOptions& options,
                       const std::vector<ParameterSpec>& parameters = {});

/// Those of `groups` that consist of ranks of `members`, with each rank given as its position in `members`.
std::vector<std::vector<int>> positions_in(const std::vector<int>& members, const RankGroups& groups);

/// Axes, groups, parameters by kind, passes and samples, to read.
std::string plan_text(const ParallelPlan& plan);

}  // namespace trireme
