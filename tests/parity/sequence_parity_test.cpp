// An engine whose ranks have parts of each sample trains as one rank that has whole samples.
#include "tests/parity/sequence_parity.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/randn.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/transformerlayer.h>

#include "trireme/sequence/sequence_parallel.h"

namespace trireme::sequence_parity {
namespace {

INSTANTIATE_TEST_SUITE_P(Layouts, SequenceParity,
                         ::testing::Values(Layout{"Ulysses2", 1, 2, "ulysses"}, Layout{"Ulysses4", 1, 4, "ulysses"},
                                           Layout{"Ring2", 1, 2, "ring"}, Layout{"Ring4", 1, 4, "ring"},
                                           Layout{"Data2Ulysses2", 2, 2, "ulysses"},
                                           Layout{"Data2Ring2", 2, 2, "ring"}),
                         name_of_layout);

TEST_P(SequenceParity, TrainsAsOneRankAtEveryStage) {
  for (const ZeroStage& stage : kZeroStages) {
    SCOPED_TRACE(stage.name);
    Json json = settings_of_layout();
    json["zero_optimization"]["stage"] = stage.policy.stage;
    json["trireme"]["gather"] = stage.policy.gather == GatherPolicy::kShared ? "shared" : "copy";
    expect_near(train(ranks(), json), of_one_rank(), 1e-5);
  }
}

// More layouts of these two: sequence_parity_slow_test.cpp.
class SequenceParityOfFewLayouts : public SequenceParity {};
INSTANTIATE_TEST_SUITE_P(Layouts, SequenceParityOfFewLayouts,
                         ::testing::Values(Layout{"Ulysses2", 1, 2, "ulysses"}, Layout{"Data2Ring2", 2, 2, "ring"}),
                         name_of_layout);

TEST_P(SequenceParityOfFewLayouts, TrainsAsOneRankWithRecomputation) { expect_parity_with_recomputation(); }
TEST_P(SequenceParityOfFewLayouts, TrainsAsOneRankIn16Bits) { expect_parity_in_16_bits(); }

/// libtorch's own layers, which write attention out, with tokens first.
TEST(SequenceParity, OfLibtorchsTransformerLayersIsOneRank) {
  const auto make = [] {
    manual_seed(3);
    torch::nn::TransformerEncoderLayer layer(
        torch::nn::TransformerEncoderLayerOptions(12, 4).dim_feedforward(20).dropout(0));
    return layer;
  };
  const at::Tensor ids = at::arange(26).remainder(7).view({13, 2}), table = at::randn({7, 12}).requires_grad_();
  const auto gradients_of = [&](torch::nn::TransformerEncoderLayer layer, const at::Tensor& tokens) {
    const at::Tensor later = at::ones({tokens.size(0), tokens.size(0)}, at::kBool).triu(1);
    const at::Tensor mask = at::zeros(later.sizes()).masked_fill(later, -1e9);
    const at::Tensor loss = layer->forward(at::embedding(table, tokens), mask).tanh().square().mean();
    std::vector<at::Tensor> all{table};
    for (const at::Tensor& parameter : layer->parameters()) all.push_back(parameter);
    return torch::autograd::grad({loss}, all);
  };
  const auto expected = gradients_of(make(), ids);
  run_ranks(2, [&](Rank& rank) {
    at::set_num_threads(1);
    const auto layer = make();
    SequenceParallel parallel(rank.world());
    const auto found = gradients_of(layer, parallel.cut(ids, 0));
    for (size_t i = 0; i < expected.size(); ++i) {
      at::Tensor gradient = found[i].contiguous();
      rank.world().all_reduce(gradient).wait();
      EXPECT_LE(((gradient / 2 - expected[i]).norm() / expected[i].norm().clamp_min(1e-3)).item<double>(), 1e-5) << i;
    }
  });
}

/// Two replicas, each of two shards, each of two parts of a sample.
TEST(SequenceParity, OfReplicasTrainsAsOneRank) {
  for (const char* replicas : {"mics_shard_size", "zero_hpz_partition_size"})
    for (const char* attention : {"ulysses", "ring"})
      for (int stage = 1; stage <= 3; ++stage) {
        if (stage < 3 && std::string(replicas) == "zero_hpz_partition_size") continue;
        SCOPED_TRACE(str(replicas, ", ", attention, ", ZeRO ", stage));
        Json json = settings(4);
        json["sequence_parallel_size"] = 2;
        json["trireme"]["sequence_attention"] = attention;
        json["zero_optimization"] = {{"stage", stage}, {replicas, 2}};
        expect_near(train(8, json), of_one_rank(), 1e-5);
      }
}

TEST(SequenceParity, ACheckpointGoesOnAtAnotherDegree) {
  const TemporaryFolder folder;
  Json json = settings(1);
  json["zero_optimization"]["stage"] = 3;
  const auto part = [&](int ranks, int data, int sequence, int64_t begin, int64_t end, Outcome& all) {
    run_ranks(ranks, [&](Rank& rank) {
      at::set_num_threads(1);
      Json own = json;
      own["gradient_accumulation_steps"] = kSamples / data;
      own["sequence_parallel_size"] = sequence;
      const auto net = make_model();
      Engine engine(rank.world(), *net, {.config = read(own, ranks)});
      EXPECT_EQ(engine.load_checkpoint(folder.path()).has_value(), begin > 0);
      Outcome outcome;
      train(engine, *net, begin, end, outcome);
      engine.save_checkpoint(folder.path());
      engine.destroy();
      if (rank.id() != 0) return;
      all.norms.insert(all.norms.end(), outcome.norms.begin(), outcome.norms.end());
      all.parameters = parameters_of(*net);
    });
  };
  Outcome outcome;
  part(4, 2, 2, 0, 3, outcome);
  part(1, 1, 1, 3, 5, outcome);
  part(4, 1, 4, 5, kSteps, outcome);
  outcome.losses = of_one_rank().losses;
  expect_near(outcome, of_one_rank(), 1e-5);
}

TEST(SequenceParity, ADeterministicRunHasTheSameBitsAtEveryDataDegree) {
  const auto run = [](int data) {
    Json json = settings(data);
    json["sequence_parallel_size"] = 2;
    json["deterministic"] = true;
    json["zero_optimization"]["stage"] = 2;
    return train(2 * data, json);
  };
  const Outcome one = run(1), two = run(2);
  for (const auto& [name, parameter] : one.parameters)
    EXPECT_TRUE(at::equal(two.parameters.at(name), parameter)) << name;
}

TEST(SequenceEngine, RanksOfOneSequenceHaveTheSameSamples) {
  run_ranks(4, [](Rank& rank) {
    const auto net = make_model();
    const Engine engine(rank.world(), *net,
                        {.config = read({{"train_batch_size", 6}, {"sequence_parallel_size", 2}}, 4)});
    EXPECT_EQ(engine.data_place().rank, rank.id() / 2);
    EXPECT_EQ(engine.data_place().size, 2);
    EXPECT_EQ(engine.train_micro_batch_size_per_gpu(), 3);
    EXPECT_EQ(engine.group().size(), 4);
  });
}

TEST(SequenceEngine, RanksOfOneSequenceDropTheSameOfWholeActivationsAndOtherwiseOfParts) {
  std::vector<at::Tensor> of_part(4), of_whole(4);
  run_ranks(4, [&](Rank& rank) {
    RankContext::of_this_thread().streams().use_own_generator(5);
    const auto net = make_model();
    Json json = settings(2);
    json["sequence_parallel_size"] = 2;
    json["deterministic"] = true;
    Engine engine(rank.world(), *net, {.config = read(json, 4)});
    const at::Tensor whole = at::ones({64, 64});
    of_whole[rank.id()] = at::dropout(whole, 0.5, true);
    const at::Tensor part = at::dropout(engine.cut({.input_ids = whole}).input_ids, 0.5, true);
    of_part[rank.id()] = engine.sequence()->whole(part).chunk(2, 1)[rank.id() % 2];
  });
  EXPECT_TRUE(at::equal(of_whole[0], of_whole[1]));
  EXPECT_FALSE(at::equal(of_whole[0], of_whole[2]));
  EXPECT_FALSE(at::equal(of_part[0], of_part[1]));
}

TEST(SequenceEngine, WorksAlongTheAxesOfAGrid) {
  Json json = settings(2);
  json["sequence_parallel_size"] = 2;
  Outcome outcome;
  run_ranks(4, [&](Rank& rank) {
    at::set_num_threads(1);
    // Here ranks of one sequence are not neighbours.
    const Grid grid(rank.world(), Topology({{"sequence", 2}, {"data", 2}}));
    const auto net = make_model();
    Outcome own;
    Engine engine(grid, *net, {.config = read(json, 4)});
    EXPECT_EQ(engine.data_place().rank, rank.id() % 2);
    train(engine, *net, 0, kSteps, own);
    engine.destroy();
    own.parameters = parameters_of(*net);
    if (rank.id() == 0) outcome = std::move(own);
  });
  outcome.losses = of_one_rank().losses;
  expect_near(outcome, of_one_rank(), 1e-5);
}

TEST(SequenceEngine, RefusesAGridOfOtherDegrees) {
  run_ranks(2, [](Rank& rank) {
    const auto net = make_model();
    const Grid data(rank.world(), Topology({{"data", 2}}));
    Json json = settings(1);
    json["sequence_parallel_size"] = 2;
    try {
      Engine(data, *net, {.config = read(json, 2)});
      ADD_FAILURE() << "nothing was refused";
    } catch (const ConfigError& error) {
      EXPECT_STREQ(
          error.what(),
          "sequence_parallel_size=2, and the grid has 1 ranks on the axis \"sequence\"; make the two the same");
    }
  });
}

}  // namespace
}  // namespace trireme::sequence_parity
