// A plan is held against what it means: who is where, what is whole, what a sum of gradients becomes.
#include "trireme/parallel/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/parallel/exclusions.h"

namespace trireme {
namespace {

using Ranks = std::vector<int>;

/// A layout of ranks that is not refused.
struct Case {
  int pipe, replicas, shards, sequence, tensor = 1;
  Degrees degrees() const {
    return {.data = replicas * shards, .pipe = pipe, .tensor = tensor, .sequence = sequence, .replicas = replicas};
  }
  int world() const { return pipe * replicas * shards * sequence * tensor; }
  std::string name() const {
    return str("pipe ", pipe, ", replicas ", replicas, ", shards ", shards, ", sequence ", sequence, ", tensor ",
               tensor);
  }
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int pipe : {1, 2, 3})
    for (const int replicas : {1, 2, 3})
      for (const int shards : {1, 2, 5})
        for (const int sequence : {1, 2, 4})
          if ((pipe == 1 && replicas == 1) || sequence == 1) all.push_back({pipe, replicas, shards, sequence});
  for (const int shards : {1, 2, 5})
    for (const int tensor : {2, 3}) all.push_back({1, 1, shards, 1, tensor});
  return all;
}

PagerPolicy policy_of(int stage, ReduceOp op = ReduceOp::kMean) {
  PagerPolicy policy;
  policy.stage = stage;
  policy.gradient_op = op;
  policy.units.merge_below_bytes = 0;
  return policy;
}

std::vector<ParameterSpec> parameters() {
  return {{.name = "embed", .shape = {50, 7}},
          {.name = "layers.0.weight", .shape = {33, 3}},
          {.name = "layers.0.bias", .shape = {3}},
          {.name = "layers.1.frozen", .shape = {130}, .trainable = false},
          {.name = "scale", .shape = {}}};
}

ParallelPlan plan_of(const Case& one, int rank, const PagerPolicy& policy, bool states_over_replicas = false) {
  return make_plan(topology_of(one.degrees(), one.world()), rank,
                   {.degrees = one.degrees(), .pager = policy, .states_over_replicas = states_over_replicas},
                   parameters());
}

std::vector<ParallelPlan> plans_of(const Case& one, const PagerPolicy& policy, bool states_over_replicas = false) {
  std::vector<ParallelPlan> plans;
  for (int rank = 0; rank < one.world(); ++rank) plans.push_back(plan_of(one, rank, policy, states_over_replicas));
  return plans;
}

std::string refusal_of(const Topology& ranks, const ParallelOptions& options) {
  try {
    (void)make_plan(ranks, 0, options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

/// Every rank stands once in some group, and each group has `size` ranks, ascending.
void expect_partition(const RankGroups& groups, int world, int size, const std::string& what) {
  Ranks all;
  for (const Ranks& group : groups.ranks) {
    EXPECT_EQ(static_cast<int>(group.size()), size) << what;
    EXPECT_TRUE(std::is_sorted(group.begin(), group.end())) << what;
    all.insert(all.end(), group.begin(), group.end());
  }
  std::sort(all.begin(), all.end());
  Ranks expected(static_cast<size_t>(world));
  std::iota(expected.begin(), expected.end(), 0);
  EXPECT_EQ(all, expected) << what;
}

TEST(ParallelPlan, EachKindOfGroupIsAPartitionOfTheRanks) {
  for (const Case& one : cases()) {
    const ParallelPlan plan = plan_of(one, 0, policy_of(3));
    const int data = one.replicas * one.shards;
    expect_partition(plan.model, one.world(), one.world(), one.name());
    expect_partition(plan.sums, one.world(), data * one.sequence, one.name());
    expect_partition(plan.shards, one.world(), one.shards * one.sequence, one.name());
    expect_partition(plan.along("replica"), one.world(), one.replicas, one.name());
    expect_partition(plan.along("sequence"), one.world(), one.sequence, one.name());
    expect_partition(plan.along("tensor"), one.world(), one.tensor, one.name());
    expect_partition(plan.along("pipe"), one.world(), one.pipe, one.name());
    for (int rank = 0; rank < one.world(); ++rank) {
      const Ranks& group = plan.shards.of(rank);
      EXPECT_NE(std::find(group.begin(), group.end(), rank), group.end());
    }
  }
}

// A sum over shards and then over replicas counts each rank of `sums` once.
TEST(ParallelPlan, ShardsOfAllReplicasAreTheRanksWhoseGradientsAreAdded) {
  for (const Case& one : cases()) {
    const ParallelPlan plan = plan_of(one, 0, policy_of(3));
    for (int rank = 0; rank < one.world(); ++rank) {
      Ranks reached;
      for (const int shard : plan.shards.of(rank))
        for (const int replica : plan.along("replica").of(shard)) reached.push_back(replica);
      std::sort(reached.begin(), reached.end());
      EXPECT_EQ(reached, plan.sums.of(rank)) << one.name();
    }
  }
}

TEST(ParallelPlan, NeighboursShareSamplesAndHoldTheShardsOfOneReplica) {
  for (const Case& one : cases()) {
    const std::vector<ParallelPlan> plans = plans_of(one, policy_of(3));
    const auto are_together = [](const RankGroups& groups, int a, int b) { return groups.of(a) == groups.of(b); };
    for (int rank = 0; rank + 1 < one.world(); ++rank) {
      const int shards = one.shards * one.sequence;
      EXPECT_EQ(are_together(plans[0].along("tensor"), rank, rank + 1), (rank + 1) % one.tensor != 0) << one.name();
      if (one.tensor > 1) continue;
      EXPECT_EQ(are_together(plans[0].along("sequence"), rank, rank + 1), (rank + 1) % one.sequence != 0) << one.name();
      EXPECT_EQ(are_together(plans[0].shards, rank, rank + 1), (rank + 1) % shards != 0) << one.name();
    }
    // Ranks of one stage have the same samples where they are of one sequence, and there alone.
    for (const int a : plans[0].sums.of(0))
      for (const int b : plans[0].sums.of(0))
        EXPECT_EQ(plans[a].place.rank == plans[b].place.rank, are_together(plans[0].along("sequence"), a, b))
            << one.name();
    for (const ParallelPlan& plan : plans) {
      EXPECT_EQ(plan.place.size, one.replicas * one.shards);
      EXPECT_LT(plan.place.rank, plan.place.size);
      for (const int other : plan.along("pipe").of(plan.rank)) EXPECT_EQ(plans[other].place.rank, plan.place.rank);
    }
  }
}

// Ranks that share layers have the same samples, and each of them its own ZeRO group, of its place among them.
TEST(ParallelPlan, RanksOfOneLayerHaveTheSameSamplesAndOtherSlices) {
  for (const Case& one : cases()) {
    const std::vector<ParallelPlan> plans = plans_of(one, policy_of(3));
    for (const ParallelPlan& plan : plans) {
      for (const int other : plan.along("tensor").of(plan.rank)) EXPECT_EQ(plans[other].place.rank, plan.place.rank);
      for (const int other : plan.sums.of(plan.rank))
        EXPECT_EQ(plan.topology.position_of(other, "tensor"), plan.topology.position_of(plan.rank, "tensor"));
      EXPECT_EQ(plan.mean_over, one.replicas * one.shards * one.sequence) << one.name();
    }
  }
}

// A rank's gradient is of the sum of the losses of all ranks of its sequence, by its own tokens.
TEST(ParallelPlan, ADividedSumIsTheMeanOfTheSamplesOwnersOrTheirSum) {
  for (const ReduceOp op : {ReduceOp::kMean, ReduceOp::kSum})
    for (const Case& one : cases()) {
      const std::vector<ParallelPlan> plans = plans_of(one, policy_of(2, op));
      double sum = 0, expected = 0;
      std::set<int> owners;
      for (const int rank : plans[0].sums.of(0)) {
        const double sample = 3 + plans[rank].place.rank;  // its whole gradient
        if (owners.insert(plans[rank].place.rank).second) expected += sample;
        const Ranks& sharers = plans[rank].along("sequence").of(rank);
        const auto place = std::find(sharers.begin(), sharers.end(), rank) - sharers.begin();
        const double share = sharers.size() == 1 ? 1 : place == 0 ? 0.5 : 0.5 / static_cast<double>(sharers.size() - 1);
        sum += static_cast<double>(sharers.size()) * share * sample;
      }
      if (op == ReduceOp::kMean) expected /= static_cast<double>(owners.size());
      // The pager's arithmetic: kSum looks at no divisor.
      const double reduced = plans[0].reduce_op == ReduceOp::kSum ? sum : sum / static_cast<double>(plans[0].mean_over);
      EXPECT_NEAR(reduced, expected, 1e-9) << one.name();
      EXPECT_EQ(sum / static_cast<double>(plans[0].parameters[0].mean_over), reduced) << one.name();
    }
}

/// The elements [0, numel) stand once in the intervals.
bool is_partition(std::vector<Interval> parts, int64_t numel) {
  std::erase_if(parts, [](const Interval& part) { return part.size() == 0; });
  std::sort(parts.begin(), parts.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  int64_t end = 0;
  for (const Interval& part : parts) {
    if (part.begin != end) return false;
    end = part.end;
  }
  return end == numel;
}

/// The ranks that differ from `plan`'s along `axes` alone.
Ranks along(const ParallelPlan& plan, const std::vector<std::string>& axes) {
  Ranks ranks;
  for (int rank = 0; rank < plan.topology.size(); ++rank) {
    bool differs_elsewhere = false;
    for (const PlannedAxis& axis : plan.axes)
      differs_elsewhere |= std::find(axes.begin(), axes.end(), axis.part->name) == axes.end() &&
                           plan.topology.position_of(rank, axis.part->name) != axis.position;
    if (!differs_elsewhere) ranks.push_back(rank);
  }
  return ranks;
}

TEST(ParallelPlan, ShardsOfEachParameterAreAPartitionOfItsElements) {
  for (const bool states_over_replicas : {false, true})
    for (const int stage : {0, 1, 2, 3})
      for (const Case& one : cases()) {
        if ((stage == 0 && one.replicas > 1) || (states_over_replicas && stage < 3)) continue;
        const std::vector<ParallelPlan> plans = plans_of(one, policy_of(stage), states_over_replicas);
        for (const ParallelPlan& plan : plans)
          for (size_t i = 0; i < parameters().size(); ++i) {
            const ParameterSpec spec = parameters()[i];
            const PlannedParameter& parameter = plan.parameters[i];
            std::vector<Interval> held, updated;
            for (const int rank : along(plan, parameter.weights_over)) held.push_back(plans[rank].parameters[i].held);
            for (const int rank : along(plan, parameter.states_over))
              updated.push_back(plans[rank].parameters[i].updated);
            const std::string what = str(one.name(), ", stage ", stage, ", ", parameter.name);
            EXPECT_TRUE(is_partition(held, spec.numel())) << what;
            EXPECT_TRUE(is_partition(updated, spec.trainable ? spec.numel() : 0)) << what;
            // A rank holds all that it updates, or all of the parameter.
            if (parameter.updated.size() > 0) {
              EXPECT_GE(parameter.updated.begin, parameter.held.begin) << what;
              EXPECT_LE(parameter.updated.end, parameter.held.end) << what;
            }
            EXPECT_EQ(parameter.weights_over.empty(), stage < 3 || one.shards * one.sequence == 1) << what;
            EXPECT_EQ(parameter.gradient_sum.empty(), !spec.trainable || plan.sums.size() == 1) << what;
          }
      }
}

TEST(ParallelPlan, StatesOverReplicasAreCutFurtherByTheirNumber) {
  const Case one{.pipe = 1, .replicas = 3, .shards = 2, .sequence = 1};
  const ParallelPlan hpz = plan_of(one, 0, policy_of(3), true), mics = plan_of(one, 0, policy_of(3));
  EXPECT_EQ(hpz.parameters[0].states_over, (std::vector<std::string>{"shard", "replica"}));
  EXPECT_EQ(mics.parameters[0].states_over, std::vector<std::string>{"shard"});
  EXPECT_EQ(hpz.parameters[0].weights_over, mics.parameters[0].weights_over);
  EXPECT_LT(hpz.parameters[0].updated.size(), mics.parameters[0].updated.size());
}

TEST(ParallelPlan, TheOrderOfAxesDecidesWhoIsNeighbour) {
  const ParallelOptions options{.degrees = {.data = 4, .pipe = 2, .replicas = 2}, .pager = policy_of(3)};
  const ParallelPlan inner = make_plan(Topology({{"data", 4}, {"pipe", 2}}), 5, options);
  EXPECT_EQ(inner.along("pipe").of(5), (Ranks{4, 5}));
  EXPECT_EQ(inner.sums.of(5), (Ranks{1, 3, 5, 7}));
  EXPECT_EQ(inner.shards.of(5), (Ranks{5, 7}));
  EXPECT_EQ(inner.along("replica").of(5), (Ranks{1, 5}));
  EXPECT_EQ(inner.place.rank, 2);
  EXPECT_EQ(positions_in(inner.sums.of(5), inner.shards), (std::vector<Ranks>{{0, 1}, {2, 3}}));
  EXPECT_EQ(positions_in(inner.sums.of(5), inner.along("replica")), (std::vector<Ranks>{{0, 2}, {1, 3}}));
}

TEST(ParallelPlan, PassesStandInTheOrderOfTheChain) {
  for (const auto& [sequence, tensor] : {std::pair{1, 1}, {2, 1}, {1, 2}, {2, 2}})
    for (const bool tiles : {false, true})
      for (const bool recomputes : {false, true}) {
        const Degrees degrees{.data = 2, .tensor = tensor, .sequence = sequence};
        const ParallelPlan plan = make_plan(topology_of(degrees, 2 * sequence * tensor), 0,
                                            {.degrees = degrees,
                                             .pager = policy_of(3),
                                             .takes_sizes_from_inputs = true,
                                             .recomputes_selectively = recomputes,
                                             .computes_in_tiles = tiles});
        std::vector<PassOrder> expected;
        if (sequence > 1) expected.push_back(PassOrder::kSequence);
        if (tensor > 1 && sequence == 1) expected.push_back(PassOrder::kTensor);
        if (tiles) expected.push_back(PassOrder::kTiles);
        if (recomputes) expected.push_back(PassOrder::kRecompute);
        expected.push_back(PassOrder::kTouch);
        std::vector<PassOrder> found;
        for (const PlannedPass& pass : plan.passes) found.push_back(pass.order);
        EXPECT_EQ(found, expected);
        EXPECT_TRUE(std::is_sorted(found.begin(), found.end()));
        EXPECT_EQ(plan.passes.back().axes, plan.shards.axes);
        if (sequence > 1 && tensor > 1) {
          EXPECT_EQ(plan.passes.front().axes, (std::vector<std::string>{"sequence", "tensor"}));
        }
      }
}

TEST(ParallelPlan, OwnershipIsTheOutermostPassWhereThereAreStages) {
  const auto passes = [](int pipe, bool has_ownership) {
    const Degrees degrees{.data = 2, .pipe = pipe};
    return make_plan(topology_of(degrees, 2 * pipe), 0, {.degrees = degrees, .has_ownership = has_ownership}).passes;
  };
  const std::vector<PlannedPass> planned = passes(2, true);
  ASSERT_EQ(planned.size(), 2u);
  EXPECT_EQ(planned.front().order, PassOrder::kOwnership);
  EXPECT_EQ(planned.front().axes, std::vector<std::string>{"pipe"});
  EXPECT_EQ(passes(1, true).size(), 1u);
  EXPECT_EQ(passes(2, false).size(), 1u);  // a PipelineModule's
}

TEST(ParallelPlan, RefusesAxesAndDegreesByName) {
  EXPECT_EQ(
      refusal_of(Topology({{"data", 2}, {"other", 2}}), {.degrees = {.data = 2}}),
      "axis \"other\" of 2 ranks is not there yet; use \"pipe\", \"data\", \"sequence\", \"tensor\" and \"model\"");
  EXPECT_EQ(refusal_of(Topology({{"data", 4}}), {.degrees = {.data = 4, .expert = 2}}),
            "degrees.expert=2 is not there yet; leave it 1");
  EXPECT_EQ(refusal_of(Topology({{"data", 2}}), {.degrees = {.data = 2, .tensor = 2}}),
            "tensor_parallel.autotp_size=2, and the grid has 1 ranks on the axis \"tensor\"; make the two the same");
  EXPECT_EQ(refusal_of(Topology({{"sequence", 2}, {"tensor", 3}}), {.degrees = {.tensor = 3, .sequence = 2}}),
            "axes \"sequence\" of 2 and \"tensor\" of 3 ranks: the program may compute with the sizes of a slice of a "
            "parameter, beside activations that say the whole's; where it reads sizes of its inputs alone, set "
            "InitializeOptions::takes_sizes_from_inputs, or make one of the two 1");
  EXPECT_EQ(refusal_of(Topology({{"sequence", 2}, {"tensor", 3}}),
                       {.degrees = {.tensor = 3, .sequence = 2}, .takes_sizes_from_inputs = true}),
            "");
  EXPECT_EQ(refusal_of(Topology({{"data", 2}}), {.degrees = {.pipe = 2}}),
            "degrees.pipe=2, and this engine's ranks have 1 on the axis \"pipe\"; train a PipelineModule, which cuts a "
            "model into stages, or leave it 1");
  EXPECT_EQ(refusal_of(Topology({{"data", 2}}), {.degrees = {.sequence = 2}}),
            "sequence_parallel_size=2, and the grid has 1 ranks on the axis \"sequence\"; make the two the same");
  EXPECT_EQ(refusal_of(Topology({{"pipe", 2}, {"sequence", 2}}), {.degrees = {.pipe = 2, .sequence = 2}}), "");
  EXPECT_EQ(refusal_of(Topology({{"pipe", 2}, {"sequence", 2}}),
                       {.degrees = {.pipe = 2, .sequence = 2}, .has_ownership = true}),
            "axes \"pipe\" of 2 and \"sequence\" of 2 ranks: stages of a step function do not take parts of sequences "
            "yet; make one of the two 1, or train a PipelineModule");
  EXPECT_EQ(refusal_of(Topology({{"data", 4}}), {.degrees = {.data = 4, .replicas = 3}, .pager = policy_of(3)}),
            "degrees.replicas=3 must divide the data degree, 4; choose another");
  EXPECT_EQ(refusal_of(Topology({{"other", 1}, {"data", 4}}), {.degrees = {.data = 4}}), "");
}

TEST(Exclusions, StandOnceForEachPair) {
  std::set<std::pair<Feature, Feature>> pairs;
  for (const Exclusion& row : exclusions()) {
    EXPECT_TRUE(pairs.insert(std::minmax(row.one, row.other)).second);
    EXPECT_EQ(exclusion_of(row.other, row.one).text, row.text);
  }
}

TEST(Exclusions, ThatOptionsTellAreRefusedByThePlan) {
  const ParallelOptions replicas{.degrees = {.data = 4, .replicas = 2}, .pager = policy_of(3)};
  const std::map<std::pair<Feature, Feature>, std::function<void(ParallelOptions&)>> switched_on = {
      {{Feature::kReplicas, Feature::kUnsharded}, [](ParallelOptions& options) { options.pager.stage = 0; }},
      {{Feature::kReplicas, Feature::kDeterministic},
       [](ParallelOptions& options) { options.pager.deterministic = true; }},
      {{Feature::kStatesOverReplicas, Feature::kOffload},
       [](ParallelOptions& options) {
         options.states_over_replicas = true;
         options.pager.offload_ratio = 0.5;
       }},
      {{Feature::kStatesOverReplicas, Feature::kWeightsOnDisk},
       [](ParallelOptions& options) {
         options.states_over_replicas = true;
         options.pager.disk.folder = "/disk";
       }},
      {{Feature::kAnySizes, Feature::kShardedTokens},
       [](ParallelOptions& options) {
         options.degrees = {.data = 1, .pipe = 2, .tensor = 2};
         options.shards_tokens = true;
       }},
      {{Feature::kShardedTokens, Feature::kSequence},
       [](ParallelOptions& options) {
         options.degrees = {.data = 1, .tensor = 2, .sequence = 2};
         options.shards_tokens = options.takes_sizes_from_inputs = true;
       }},
      {{Feature::kAnySizes, Feature::kTensor},
       [](ParallelOptions& options) { options.degrees = {.data = 1, .tensor = 2, .sequence = 2}; }},
      {{Feature::kProgramSlices, Feature::kTensor},
       [](ParallelOptions& options) { options.degrees = {.data = 1, .tensor = 2, .model = 2}; }},
      {{Feature::kProgramSlices, Feature::kSequence},
       [](ParallelOptions& options) { options.degrees = {.data = 1, .sequence = 2, .model = 2}; }},
      {{Feature::kOwnershipOfAnySizes, Feature::kTensor},
       [](ParallelOptions& options) {
         options.degrees = {.data = 1, .pipe = 2, .tensor = 2};
         options.has_ownership = true;
       }},
      {{Feature::kOwnership, Feature::kProgramSlices},
       [](ParallelOptions& options) {
         options.degrees = {.data = 1, .pipe = 2, .model = 2};
         options.has_ownership = true;
       }},
      {{Feature::kOwnership, Feature::kSequence},
       [](ParallelOptions& options) {
         options.degrees = {.data = 1, .pipe = 2, .sequence = 2};
         options.has_ownership = true;
       }},
  };
  EXPECT_EQ(first_exclusion(replica_axis(), replicas), nullptr);
  for (const AxisPart* axis : all_axes())
    for (const AxisExclusion& row : axis->exclusions) {
      if (row.at) continue;
      ParallelOptions options = replicas;
      switched_on.at({row.option.value_or(*axis->feature), row.other})(options);
      const Degrees& degrees = options.degrees;
      ASSERT_EQ(first_exclusion(*axis, options), &row) << row.text;
      const std::string expected = filled(row.text, {axis == &replica_axis() ? "degrees.replicas=2" : "2", "2"});
      const int world = degrees.data * degrees.pipe * degrees.sequence * degrees.tensor * degrees.model;
      EXPECT_EQ(refusal_of(topology_of(degrees, world), options), expected);
    }
}

TEST(ParallelPlan, IsPrinted) {
  const Degrees degrees{.data = 4, .pipe = 2, .replicas = 2};
  const ParallelPlan plan =
      make_plan(topology_of(degrees, 8), 3, {.degrees = degrees, .pager = policy_of(2)}, parameters());
  EXPECT_EQ(plan_text(plan),
            "rank 3 of 8\n\n"
            "axes\n"
            "  pipe      2, position 0; ranks 0,4 1,5 2,6 3,7\n"
            "  replica   2, position 1; ranks 0,2 1,3 4,6 5,7\n"
            "  shard     2, position 1; ranks 0,1 2,3 4,5 6,7\n"
            "ranks that, together with this one,\n"
            "  step together         0-7\n"
            "  add gradients         0-3\n"
            "  hold all shards       2,3\n"
            "  are a pipeline        3,7\n"
            "  hold the same shards  1,3\n"
            "samples\n"
            "  place 3 of 4\n"
            "parameters; each stage has those of its layers\n"
            "  4 parameters, such as embed; ZeRO 2: gradients and optimizer states are sharded\n"
            "    weights    whole on each rank\n"
            "    gradients  sharded along shard\n"
            "    states     sharded along shard\n"
            "    sum        of gradients along replica, shard, divided by 4\n"
            "  1 parameter, such as layers.1.frozen; frozen: every rank keeps all of it\n"
            "    weights    whole on each rank\n"
            "passes over operators, outermost first\n"
            "  pager\n");
}

TEST(ParallelPlan, OfSlicesIsPrinted) {
  const Degrees degrees{.data = 2, .tensor = 2};
  std::vector<ParameterSpec> specs = {{.name = "norm", .shape = {3}, .is_counted = false},
                                      {.name = "up", .shape = {2, 3}, .part = {{4, 3}, 0, {{2, 4}}}}};
  const ParallelPlan plan = make_plan(topology_of(degrees, 4), 1, {.degrees = degrees, .pager = policy_of(1)}, specs);
  EXPECT_EQ(
      plan_text(plan),
      "rank 1 of 4\n\n"
      "axes\n"
      "  replica   1, position 0\n"
      "  shard     2, position 0; ranks 0,2 1,3\n"
      "  tensor    2, position 1; ranks 0,1 2,3\n"
      "ranks that, together with this one,\n"
      "  step together         0-3\n"
      "  add gradients         1,3\n"
      "  hold all shards       1,3\n"
      "  share layers          0,1\n"
      "samples\n"
      "  place 0 of 2\n"
      "parameters\n"
      "  1 parameter, such as norm; ZeRO 1: optimizer states are sharded\n"
      "    weights    whole on each rank\n"
      "    gradients  whole on each rank\n"
      "    states     sharded along shard\n"
      "    sum        of gradients along shard, divided by 2\n"
      "  1 parameter, such as up; cut along dim 0 over \"tensor\"; of a slice, ZeRO 1: optimizer states are sharded\n"
      "    weights    whole on each rank\n"
      "    gradients  whole on each rank\n"
      "    states     sharded along shard\n"
      "    sum        of gradients along shard, divided by 2\n"
      "passes over operators, outermost first\n"
      "  tensor, along tensor\n"
      "  pager\n");
}

TEST(ParallelPlan, OfManyRanksIsPrintedInShort) {
  const Degrees degrees{.data = 64, .sequence = 8};
  const std::string text =
      plan_text(make_plan(topology_of(degrees, 512), 9, {.degrees = degrees, .pager = policy_of(3)}));
  EXPECT_NE(text.find("  shard     64, position 1; ranks 0,8,…,504 1,9,…,505 2,10,…,506 3,11,…,507 … 8 groups\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("  share samples         8-15\n"), std::string::npos) << text;
  EXPECT_NE(text.find("  sequence, Ulysses, along sequence\n  pager, along shard, sequence\n"), std::string::npos)
      << text;
}

}  // namespace
}  // namespace trireme
