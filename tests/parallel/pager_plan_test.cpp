// The pager cuts parameters as the plan says.
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/pager/pager.h"
#include "trireme/parallel/plan.h"

namespace trireme {
namespace {

const std::vector<std::pair<std::string, std::vector<int64_t>>> kShapes = {
    {"embed", {50, 7}}, {"layers.0.weight", {33, 3}}, {"layers.0.bias", {3}}, {"norm", {70}}};

/// The elements of each parameter that `pager` has this rank update.
std::vector<Interval> updated_by(const Pager& pager) {
  std::vector<Interval> updated(kShapes.size());
  for (const OwnedSlice& slice : pager.owned())
    for (const ParameterRange& range : ranges_of(pager.layout().units[slice.unit], slice.begin, slice.weights.numel()))
      updated[range.parameter] = {range.parameter_begin, range.parameter_begin + range.numel};
  return updated;
}

struct ShardedRun {
  int replicas = 1, shards = 1, stage = 0;
  bool states_over_replicas = false;
};

TEST(PagerPlan, EachRankUpdatesTheElementsThatItsPlanNames) {
  const std::vector<ShardedRun> cases = {{1, 4, 0}, {1, 3, 1}, {1, 4, 2},       {1, 4, 3},
                                         {2, 2, 3}, {2, 2, 2}, {2, 2, 3, true}, {3, 2, 3, true}};
  for (const ShardedRun& one : cases)
    run_ranks(one.replicas * one.shards, [&](Rank& rank) {
      const Degrees degrees{.data = rank.size(), .replicas = one.replicas};
      PagerPolicy policy;
      policy.stage = one.stage;
      policy.units.merge_below_bytes = 0;
      std::vector<NamedParameter> named;
      std::vector<ParameterSpec> specs;
      for (const auto& [name, shape] : kShapes) {
        named.push_back({.name = name, .tensor = at::zeros(shape).requires_grad_()});
        specs.push_back({.name = name, .shape = shape});
      }
      const ParallelPlan plan =
          make_plan(topology_of(degrees, rank.size()), rank.id(),
                    {.degrees = degrees, .pager = policy, .states_over_replicas = one.states_over_replicas}, specs);
      const auto shards = rank.world().split(plan.shards.ranks, "shards");
      const auto replicas = rank.world().split(plan.along("replica").ranks, "replicas");
      const ShardMesh mesh{.shards = *shards,
                           .replicas = one.replicas > 1 ? replicas.get() : nullptr,
                           .states_over_replicas = plan.states_over_replicas,
                           .mean_over = plan.mean_over};
      EXPECT_EQ(mesh.divisor(), (ShardMesh{.shards = *shards, .replicas = mesh.replicas}).divisor());
      const Pager pager(rank.world(), {mesh}, std::move(named), policy);
      const std::vector<Interval> updated = updated_by(pager);
      for (size_t i = 0; i < kShapes.size(); ++i)
        EXPECT_EQ(updated[i], plan.parameters[i].updated)
            << "stage " << one.stage << ", rank " << rank.id() << ", " << kShapes[i].first << ": "
            << plan.parameters[i].updated.begin << "-" << plan.parameters[i].updated.end;
    });
}

}  // namespace
}  // namespace trireme
