// Parameters that are sharded within replicas, beside others that are sharded otherwise.
#include <ATen/ops/allclose.h>
#include <ATen/ops/full.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <tuple>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/base/error.h"
#include "trireme/pager/init/gathered.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int kShards = 2, kReplicas = 2, kRanks = kShards * kReplicas;

/// Rank 2 r + s keeps shard s of replica r.
class Square {
 public:
  explicit Square(Group& world) {
    shards_ = world.split({{0, 1}, {2, 3}}, "shards");
    replicas_ = world.split({{0, 2}, {1, 3}}, "replicas");
    alone_ = world.split({{0}, {1}, {2}, {3}}, "alone");
  }
  ShardMesh hybrid(bool states_over_replicas = false) const {
    return {.shards = *shards_, .replicas = replicas_.get(), .states_over_replicas = states_over_replicas};
  }
  /// Plain data parallelism: nothing is cut.
  ShardMesh whole(Group& world) const { return {.shards = *alone_, .replicas = &world}; }

 private:
  std::unique_ptr<Group> shards_, replicas_, alone_;
};

std::vector<at::Tensor> one_process(int micro_batches) {
  std::vector<at::Tensor> weights;
  run_ranks(1, [&](Rank&) {
    manual_seed(3);
    Chain net(3);
    for (int step = 0; step < 3; ++step) {
      for (int rank = 0; rank < kRanks; ++rank) {
        manual_seed(100 * step + rank);
        for (int micro = 0; micro < micro_batches; ++micro) (loss_of(net) / kRanks).backward();
      }
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : net->parameters()) parameter.sub_(parameter.grad() * 0.1);
      net->zero_grad();
    }
    weights = copies_of(net->parameters());
  });
  return weights;
}

struct Case {
  ZeroStage sharding;
  bool states_over_replicas = false;
};

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (const ZeroStage& sharding : kZeroStages)
    for (const bool cut : {false, true}) cases.push_back({sharding, cut});
  return cases;
}

class Hybrid : public ::testing::TestWithParam<Case> {};

using BeforeMicroBatch = std::function<void(Pager&, int micro)>;

/// Weights of all ranks after three steps of `micro_batches`.
std::vector<std::vector<at::Tensor>> train(const Case& which, int micro_batches, const BeforeMicroBatch& before = {}) {
  at::set_num_threads(1);
  std::vector<std::vector<at::Tensor>> weights(kRanks);
  run_ranks(kRanks, [&](Rank& rank) {
    const Square square(rank.world());
    manual_seed(rank.id() == 0 ? 3 : 4);  // rank 0's values count
    Chain net(3);
    Pager pager(rank.world(), {square.hybrid(which.states_over_replicas)}, named_parameters_of(*net),
                which.sharding.policy);
    for (int step = 0; step < 3; ++step) {
      manual_seed(100 * step + rank.id());
      for (int micro = 0; micro < micro_batches; ++micro) {
        if (before) before(pager, micro);
        loss_of(net).backward();
        pager.end_backward();
      }
      sgd_step(pager, 0.1);
    }
    pager.restore();
    weights[rank.id()] = copies_of(net->parameters());
  });
  return weights;
}

void expect_as_one_process(const std::vector<std::vector<at::Tensor>>& got, int micro_batches) {
  const std::vector<at::Tensor> expected = one_process(micro_batches);
  for (int rank = 0; rank < kRanks; ++rank)
    for (size_t i = 0; i < expected.size(); ++i) {
      EXPECT_TRUE(at::allclose(got[rank][i], expected[i], 1e-5, 1e-6)) << "parameter " << i << " of rank " << rank;
      EXPECT_TRUE(at::equal(got[rank][i], got[0][i])) << "parameter " << i << " of ranks 0 and " << rank;
    }
}

TEST_P(Hybrid, TrainsLikeOneProcess) { expect_as_one_process(train(GetParam(), 2), 2); }

TEST_P(Hybrid, AWindowMayBeReducedBeforeItsEnd) {
  const BeforeMicroBatch reduce = [](Pager& pager, int micro) {
    if (micro > 0) pager.reduce_now();
  };
  expect_as_one_process(train(GetParam(), 3, reduce), 3);
}

TEST_P(Hybrid, ReductionsMayBeDeferred) {
  const BeforeMicroBatch defer_first = [](Pager& pager, int micro) { pager.defer_reductions(micro == 0); };
  expect_as_one_process(train(GetParam(), 2, defer_first), 2);
}

double squares_of_all(Rank& rank, const ClosedWindow& window) {
  at::Tensor sum = at::full({1}, window.squares().total(), at::kDouble);
  rank.world().all_reduce(sum).wait();
  return sum.item<double>();
}

TEST_P(Hybrid, TheNormCountsEachElementOnce) {
  run_ranks(kRanks, [&](Rank& rank) {
    const Square square(rank.world());
    at::Tensor weight = at::ones({70}).requires_grad_();
    at::Tensor other = at::ones({30}).requires_grad_();
    ShardMesh elsewhere = square.hybrid(GetParam().states_over_replicas);
    elsewhere.counts_in_norm = false;
    Pager pager(rank.world(), {square.hybrid(GetParam().states_over_replicas), square.whole(rank.world()), elsewhere},
                {{"w", weight},
                 {"other", other, at::ScalarType::Undefined, 1},
                 {"again", at::ones({8}).requires_grad_(), at::ScalarType::Undefined, 2}},
                GetParam().sharding.policy);
    (weight.sum() * 2 + other.sum()).backward();
    pager.end_backward();
    ClosedWindow window = pager.close_window();
    EXPECT_EQ(squares_of_all(rank, window), 70 * 4 + 30);
    window.meet();
    window.open();
  });
}

// Other ranks hold the same elements and count them. All parameters stand in one unit.
TEST_P(Hybrid, TheNormLeavesOutWhatIsNotCounted) {
  run_ranks(kRanks, [&](Rank& rank) {
    const Square square(rank.world());
    std::vector<NamedParameter> parameters;
    for (const auto& [name, numel, is_counted] : {std::tuple("a", 30, true), {"b", 50, false}, {"c", 70, true}})
      parameters.push_back({.name = name, .tensor = at::ones({numel}).requires_grad_(), .is_counted = is_counted});
    // Rows of 23 elements, nine from the fifth on.
    parameters.push_back({.name = "d",
                          .tensor = at::ones({4, 23}).requires_grad_(),
                          .part = {{4, 40}, 1, {{10, 33}}},
                          .counted = {{4, 40}, 1, {{14, 20}, {30, 33}}}});
    Pager pager(rank.world(), {square.hybrid(GetParam().states_over_replicas)}, parameters, GetParam().sharding.policy);
    EXPECT_FALSE(pager.parameters()[1].is_counted);
    at::Tensor loss;
    for (const NamedParameter& parameter : parameters) {
      const at::Tensor sum = parameter.tensor.sum() * 2;
      loss = loss.defined() ? loss + sum : sum;
    }
    loss.backward();
    pager.end_backward();
    ClosedWindow window = pager.close_window();
    EXPECT_EQ(squares_of_all(rank, window), (30 + 70 + 4 * 9) * 4);
    window.meet();
    window.open();
  });
}

TEST_P(Hybrid, AGradientOfOneReplicaCountsForAll) {
  run_ranks(kRanks, [&](Rank& rank) {
    const Square square(rank.world());
    at::Tensor weight = at::ones({70}).requires_grad_();
    Pager pager(rank.world(), {square.hybrid(GetParam().states_over_replicas)}, {{"w", weight}},
                GetParam().sharding.policy);
    for (int step = 0; step < 2; ++step) {
      // In the first step all ranks have a gradient, so that stale sums would show in the second one.
      const at::Tensor loss = weight.sum() * 8;
      if (step == 0 || rank.id() == 3) loss.backward();
      pager.end_backward();
      ClosedWindow window = pager.close_window();
      EXPECT_TRUE(window.touched()[0]);
      const double expected = step == 0 ? 8 : 2;
      const OwnedSlice& slice = pager.owned()[0];
      for (const ParameterRange& range : ranges_of(pager.layout().units[0], slice.begin, slice.gradients.numel())) {
        const at::Tensor part = slice.gradients.narrow(0, range.slice_begin, range.numel);
        EXPECT_TRUE(at::equal(part, at::full_like(part, expected))) << "step " << step;
      }
      EXPECT_EQ(squares_of_all(rank, window), 70 * expected * expected);
      window.meet();
      for (const OwnedSlice& each : pager.owned()) window.publish(each.unit);
      window.open();
    }
  });
}

TEST_P(Hybrid, WhatOneRankWritesInAScopeIsEverybodys) {
  run_ranks(kRanks, [&](Rank& rank) {
    const Square square(rank.world());
    at::Tensor weight = at::zeros({70}).requires_grad_();
    Pager pager(rank.world(), {square.hybrid(GetParam().states_over_replicas)}, {{"w", weight}},
                GetParam().sharding.policy);
    zero::GatheredParameters whole({weight}, {.modifier_rank = 1});
    if (rank.id() == 1) {
      const at::NoGradGuard no_grad;
      weight.fill_(5);
    }
    whole.close();
    EXPECT_EQ((weight * 1).sum().item<float>(), 350) << "rank " << rank.id();
    pager.restore();
  });
}

INSTANTIATE_TEST_SUITE_P(Shardings, Hybrid, ::testing::ValuesIn(all_cases()), [](const auto& info) {
  return info.param.sharding.name + (info.param.states_over_replicas ? "CutStates" : "");
});

TEST(Meshes, AReplicaKeepsAPieceOfItsShardsStates) {
  run_ranks(kRanks, [](Rank& rank) {
    const Square square(rank.world());
    at::Tensor weight = at::ones({128}).requires_grad_();
    Pager pager(rank.world(), {square.hybrid(/*states_over_replicas=*/true)}, {{"w", weight}},
                {.stage = 3, .gather = GatherPolicy::kCopy});
    const OwnedSlice& slice = pager.owned()[0];
    EXPECT_EQ(slice.weights.numel(), 32);
    EXPECT_EQ(slice.gradients.numel(), 32);
    EXPECT_EQ(slice.begin, 64 * (rank.id() % 2) + 32 * (rank.id() / 2));
    EXPECT_EQ(pager.memory().weight_bytes, 64 * 4);  // a gather needs no other replica
  });
}

TEST(Meshes, SeveralInOnePagerTrainLikeOneProcess) {
  for (const ZeroStage& sharding : kZeroStages) {
    std::vector<std::vector<at::Tensor>> got(kRanks);
    run_ranks(kRanks, [&](Rank& rank) {
      const Square square(rank.world());
      manual_seed(3);
      Chain net(3);
      std::vector<NamedParameter> parameters = named_parameters_of(*net);
      for (size_t i = 0; i < parameters.size(); ++i) parameters[i].mesh = static_cast<int>(i);
      Pager pager(rank.world(), {square.hybrid(), square.whole(rank.world()), {.shards = rank.world()}}, parameters,
                  sharding.policy);
      for (int step = 0; step < 3; ++step) {
        manual_seed(100 * step + rank.id());
        loss_of(net).backward();
        pager.end_backward();
        sgd_step(pager, 0.1);
      }
      pager.restore();
      got[rank.id()] = copies_of(net->parameters());
    });
    SCOPED_TRACE(sharding.name);
    expect_as_one_process(got, 1);
  }
}

TEST(Meshes, AreUnitsOfTheirOwn) {
  const std::vector<ParameterSpec> parameters = {{.name = "layers.0.a", .shape = {4}},
                                                 {.name = "layers.0.b", .shape = {4}, .mesh = 1}};
  const Layout layout = make_layout(parameters, {{.shards = 2}, {.shards = 4, .pieces = 3}});
  ASSERT_EQ(layout.units.size(), 2u);
  EXPECT_EQ(layout.units[1].mesh, 1);
  EXPECT_EQ(layout.units[1].shards, 4);
  EXPECT_EQ(layout.units[1].shard_numel, 3 * kAlignment);
  EXPECT_EQ(layout.units[1].piece_numel(), kAlignment);
}

TEST(Meshes, GradientsAreDividedAsTheMeshSays) {
  run_ranks(kRanks, [](Rank& rank) {
    const Square square(rank.world());
    ShardMesh mesh = square.hybrid();
    mesh.mean_over = 8;
    at::Tensor weight = at::ones({70}).requires_grad_();
    for (const ReduceOp op : {ReduceOp::kMean, ReduceOp::kSum}) {
      Pager pager(rank.world(), {mesh}, {{"w", weight}}, {.stage = 2, .gradient_op = op});
      weight.sum().backward();
      pager.end_backward();
      ClosedWindow window = pager.close_window();
      EXPECT_EQ(pager.owned()[0].gradients[0].item<float>(), op == ReduceOp::kMean ? 0.5 : 4);
      window.meet();
      window.open();
      pager.restore();
    }
  });
}

TEST(Meshes, RefuseWhatTheyCannotKeep) {
  run_ranks(kRanks, [](Rank& rank) {
    const Square square(rank.world());
    EXPECT_EQ(error_of([&] {
                Pager pager(rank.world(), {square.hybrid()}, {{"w", at::ones({4}).requires_grad_()}},
                            {.stage = 2, .deterministic = true});
              }),
              "deterministic: a mesh with 2 replicas of group 'shards' adds within a replica first, so its sums depend "
              "on the number of replicas; shard over all ranks, or leave deterministic out");
  });
}

}  // namespace
}  // namespace trireme
