// Engines whose ranks have parts of each sample, and one rank that has whole samples, which they must train as.
#pragma once

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

using namespace testing;

inline constexpr int64_t kSteps = 10, kVocab = 29, kLength = 22;
inline constexpr int kSamples = 4;  // of a step, one in each micro-batch

struct Outcome {
  std::vector<double> losses;  ///< of each step, its mean
  std::vector<double> norms;
  std::map<std::string, at::Tensor> parameters;
};

inline std::shared_ptr<LlamaImpl> make_model() {
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

/// A sample with more targets in its second half than in its first; another one has none there.
inline SequenceInputs sample(int64_t number) {
  const at::Tensor tokens = tokens_of({number, 0}, kVocab, {1, kLength + 1});
  SequenceInputs in{.input_ids = tokens.narrow(1, 0, kLength),
                    .labels = tokens.narrow(1, 1, kLength).clone(),
                    .position_ids = at::arange(kLength, at::kLong).unsqueeze(0)};
  in.labels.narrow(1, 0, number % 3 * 5).fill_(-100);
  return in;
}

inline Json settings(int data) {
  return {{"train_micro_batch_size_per_gpu", 1},
          {"gradient_accumulation_steps", kSamples / data},
          {"gradient_clipping", 0.3},
          {"optimizer", {{"type", "SGD"}, {"params", {{"lr", 0.05}, {"momentum", 0.9}}}}}};
}

inline Config read(const Json& json, int world) {
  Config config = config_from_json(json, world);
  config.pager.poison = true;
  config.pager.live_bytes = 0;
  config.pager.units.merge_below_bytes = 0;
  return config;
}

/// Steps [begin, end), which rank 0 of each sequence group tells alike.
inline void train(Engine& engine, LlamaImpl& net, int64_t begin, int64_t end, Outcome& outcome) {
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

inline Outcome train(Group& world, const Config& config) {
  at::set_num_threads(1);
  const auto net = make_model();
  Outcome outcome;
  Engine engine(world, *net, {.config = config});
  train(engine, *net, 0, kSteps, outcome);
  engine.destroy();
  outcome.parameters = parameters_of(*net);
  return outcome;
}

inline Outcome train(int ranks, const Json& json) {
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

inline const Outcome& of_one_rank() {
  static const Outcome outcome = train(1, settings(1));
  return outcome;
}

inline void expect_near(const Outcome& got, const Outcome& expected, double tolerance) {
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

  static void expect_parity_with_recomputation() {
    for (const Json& mode : {Json("full"), Json("selective"), Json{{"extra_compute", 0.33}}}) {
      SCOPED_TRACE(mode.dump());
      Json json = settings_of_layout();
      json["zero_optimization"]["stage"] = 3;
      json["trireme"]["recompute"] = mode;
      json["trireme"]["tiled"] = {{"loss_tokens", 3}, {"mlp_tokens", 3}};
      expect_near(train(ranks(), json), of_one_rank(), 1e-5);
    }
  }
  static void expect_parity_in_16_bits() {
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
};

inline std::string name_of_layout(const ::testing::TestParamInfo<Layout>& info) { return info.param.name; }

}  // namespace trireme::sequence_parity
