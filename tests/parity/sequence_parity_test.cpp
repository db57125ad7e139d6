// An engine whose ranks have parts of each sample trains as one rank that has whole samples.
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/comm/grid.h"
#include "trireme/engine/engine.h"
#include "trireme/intercept/random_streams.h"

namespace trireme::sequence_parity {
namespace {

using namespace testing;

constexpr int64_t kSteps = 10, kVocab = 29, kLength = 22;
constexpr int kSamples = 4;  // of a step, one in each micro-batch

struct Outcome {
  std::vector<double> losses;  ///< of each step, its mean
  std::vector<double> norms;
  std::map<std::string, at::Tensor> parameters;
};

std::shared_ptr<LlamaImpl> make_model() {
  auto net = std::make_shared<LlamaImpl>(LlamaOptions{.vocab_size = kVocab,
                                                      .hidden_size = 32,
                                                      .intermediate_size = 48,
                                                      .num_hidden_layers = 2,
                                                      .num_attention_heads = 4,
                                                      .num_key_value_heads = 2,
                                                      .max_position_embeddings = 32});
  draw_weights(*net);
  return net;
}

/// Of the second half of one sample more targets count than of the first, and of another one none.
SequenceInputs sample(int64_t number) {
  const at::Tensor tokens = tokens_of({number, 0}, kVocab, {1, kLength + 1});
  SequenceInputs in{.input_ids = tokens.narrow(1, 0, kLength),
                    .labels = tokens.narrow(1, 1, kLength).clone(),
                    .position_ids = at::arange(kLength, at::kLong).unsqueeze(0)};
  in.labels.narrow(1, 0, number % 3 * 5).fill_(-100);
  return in;
}

Json settings(int data) {
  return {{"train_micro_batch_size_per_gpu", 1},
          {"gradient_accumulation_steps", kSamples / data},
          {"gradient_clipping", 0.3},
          {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.05}, {"momentum", 0.9}}}}}};
}

Config read(const Json& json, int world) {
  Config config = config_from_json(json, world);
  config.pager.poison = true;
  config.pager.live_bytes = 0;
  config.pager.units.merge_below_bytes = 0;
  return config;
}

/// Steps [begin, end), which rank 0 of each sequence group tells alike.
void train(Engine& engine, LlamaImpl& net, int64_t begin, int64_t end, Outcome& outcome) {
  const DataPlace place = engine.data_place();
  for (int64_t step = begin; step < end; ++step) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int64_t micro = 0; micro < engine.gradient_accumulation_steps(); ++micro) {
      const SequenceInputs in = engine.cut(sample(step * kSamples + micro * place.size + place.rank));
      loss += engine.backward(net.loss(in.input_ids, in.labels, in.position_ids));
      engine.step();
    }
    outcome.losses.push_back(loss.item<double>());
    outcome.norms.push_back(*engine.get_global_grad_norm());
  }
}

Outcome train(Group& world, const Config& config) {
  at::set_num_threads(1);
  const auto net = make_model();
  Outcome outcome;
  Engine engine(world, *net, {.config = config});
  train(engine, *net, 0, kSteps, outcome);
  engine.destroy();
  outcome.parameters = parameters_of(*net);
  return outcome;
}

Outcome train(int ranks, const Json& json) {
  Outcome outcome;
  run_ranks(ranks, [&](Rank& rank) {
    Outcome own = train(rank.world(), read(json, ranks));
    const at::Tensor losses = at::tensor(own.losses);
    rank.world().all_reduce(losses, ReduceOp::kMean).wait();
    own.losses = {losses.const_data_ptr<double>(), losses.const_data_ptr<double>() + kSteps};
    if (rank.id() == 0) outcome = std::move(own);
  });
  return outcome;
}

const Outcome& of_one_rank() {
  static const Outcome outcome = train(1, settings(1));
  return outcome;
}

void expect_near(const Outcome& got, const Outcome& expected, double tolerance) {
  ASSERT_EQ(got.losses.size(), expected.losses.size());
  for (size_t i = 0; i < got.losses.size(); ++i) {
    EXPECT_NEAR(got.losses[i], expected.losses[i], tolerance * expected.losses[i]) << "step " << i;
    EXPECT_NEAR(got.norms[i], expected.norms[i], tolerance * expected.norms[i]) << "step " << i;
  }
  for (const auto& [name, parameter] : expected.parameters)
    EXPECT_LE((got.parameters.at(name) - parameter).abs().max().item<double>(), tolerance) << name;
}

struct Layout {
  const char* name;
  int data, sequence;
  const char* attention;
};

class SequenceParity : public ::testing::TestWithParam<Layout> {
 protected:
  static Json settings_of_layout() {
    const Layout& layout = GetParam();
    Json json = settings(layout.data);
    json["sequence_parallel_size"] = layout.sequence;
    json["trireme"]["sequence_attention"] = layout.attention;
    return json;
  }
  static int ranks() { return GetParam().data * GetParam().sequence; }
};
INSTANTIATE_TEST_SUITE_P(Layouts, SequenceParity,
                         ::testing::Values(Layout{"Ulysses2", 1, 2, "ulysses"}, Layout{"Ulysses4", 1, 4, "ulysses"},
                                           Layout{"Ring2", 1, 2, "ring"}, Layout{"Ring4", 1, 4, "ring"},
                                           Layout{"Data2Ulysses2", 2, 2, "ulysses"},
                                           Layout{"Data2Ring2", 2, 2, "ring"}),
                         [](const auto& info) { return info.param.name; });

TEST_P(SequenceParity, TrainsAsOneRankAtEveryStage) {
  for (const Variant& variant : kVariants) {
    SCOPED_TRACE(variant.name);
    Json json = settings_of_layout();
    json["zero_optimization"]["stage"] = variant.stage;
    json["trireme"]["gather"] = variant.gather == GatherPolicy::kShared ? "shared" : "copy";
    expect_near(train(ranks(), json), of_one_rank(), 1e-5);
  }
}

TEST_P(SequenceParity, TrainsAsOneRankWithRecomputation) {
  for (const Json& mode : {Json("full"), Json("selective"), Json{{"extra_compute", 0.33}}}) {
    SCOPED_TRACE(mode.dump());
    Json json = settings_of_layout();
    json["zero_optimization"]["stage"] = 3;
    json["trireme"]["recompute"] = mode;
    json["trireme"]["tiled"] = {{"loss_tokens", 3}, {"mlp_tokens", 3}};
    expect_near(train(ranks(), json), of_one_rank(), 1e-5);
  }
}

TEST_P(SequenceParity, TrainsAsOneRankIn16Bits) {
  for (const char* key : {"bf16", "fp16"}) {
    SCOPED_TRACE(key);
    Json one = settings(1);
    one[key] = {{"enabled", true}};
    // Gradients of a rank are of the sum of the ranks' losses, so a scale that begins at 65536 falls to other steps.
    if (key == std::string_view("fp16")) one[key]["initial_scale_power"] = 8;
    Json json = settings_of_layout();
    json[key] = one[key];
    json["zero_optimization"]["stage"] = 2;
    const Outcome expected = train(1, one), got = train(ranks(), json);
    for (size_t i = 0; i < got.losses.size(); ++i) EXPECT_NEAR(got.losses[i], expected.losses[i], 2e-2);
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
    of_part[rank.id()] = at::dropout(engine.cut({.input_ids = whole}).input_ids, 0.5, true);
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

TEST(SequenceEngine, RefusesAGridOfOtherDegreesAndAPipelineOfParts) {
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
  run_ranks(4, [](Rank& rank) {
    const auto net = make_model();
    const Grid grid(rank.world(), Topology({{"pipe", 2}, {"sequence", 2}}));
    EXPECT_THROW(Engine(grid, *net, {.degrees = {.pipe = 2, .sequence = 2}}), ConfigError);
  });
}

}  // namespace
}  // namespace trireme::sequence_parity
