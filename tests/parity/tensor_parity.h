// Engines whose ranks have slices of each layer, and one rank that has whole layers, which they must train as.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/json.h"
#include "trireme/engine/engine.h"
#include "trireme/pager/init/init.h"

namespace trireme::tensor_parity {

using namespace testing;

inline constexpr int64_t kSteps = 10, kVocab = 29, kLength = 12;
inline constexpr int kSamples = 4;  // of a step, one in each micro-batch

struct Outcome {
  std::vector<double> losses, norms;  ///< of each step
  std::map<std::string, at::Tensor> parameters;
};

inline std::shared_ptr<LlamaImpl> make_model(bool is_tied = false) {
  auto net = std::make_shared<LlamaImpl>(LlamaOptions{.vocab_size = kVocab,
                                                      .hidden_size = 32,
                                                      .intermediate_size = 50,
                                                      .num_hidden_layers = 2,
                                                      .num_attention_heads = 4,
                                                      .num_key_value_heads = 2,
                                                      .max_position_embeddings = 32,
                                                      .tie_word_embeddings = is_tied});
  draw_weights(*net);
  return net;
}

inline PartitionModel facts() { return {.model_type = "llama", .heads = 4, .key_value_heads = 2}; }

struct Case {
  bool is_tied = false;
  bool knows_heads = true;
  bool is_under_init = false;
  bool shards_tokens = false;
  const char* replicas = nullptr;  ///< the key that shards states over two data-parallel ranks
};

inline Json settings(int data, int tensor, int stage, const Case& of = {}) {
  Json zero = {{"stage", stage}};
  if (of.replicas != nullptr && data > 1) zero[of.replicas] = 2;
  return {{"train_micro_batch_size_per_gpu", 1},
          {"gradient_accumulation_steps", kSamples / data},
          {"gradient_clipping", 0.3},
          {"zero_optimization", zero},
          {"tensor_parallel", {{"autotp_size", tensor}, {"sequence_parallel", of.shards_tokens}}},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}, {"eps", 1e-3}}}}}};
}

inline Outcome train(Group& world, const Json& json, const Case& of) {
  at::set_num_threads(1);
  Config config = config_from_json(json, world.size());
  config.pager.poison = true;
  config.pager.live_bytes = 0;
  config.pager.units.merge_below_bytes = 0;
  const auto net = [&] {
    const zero::Init scope(world, {.smallest_bytes = 0, .live_bytes = 0, .enabled = of.is_under_init});
    return make_model(of.is_tied);
  }();
  InitializeOptions options{.config = config};
  if (of.knows_heads) options.partition_model = facts();
  options.takes_sizes_from_inputs = of.shards_tokens;
  Engine engine(world, *net, options);
  Outcome outcome;
  const DataPlace place = engine.data_place();
  for (int64_t step = 0; step < kSteps; ++step) {
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int64_t micro = 0; micro < engine.gradient_accumulation_steps(); ++micro) {
      const int64_t number = step * kSamples + micro * place.size + place.rank;
      const at::Tensor tokens = tokens_of({number, 0}, kVocab, {1, kLength + 1});
      loss += engine.backward(net->loss(tokens.narrow(1, 0, kLength), tokens.narrow(1, 1, kLength).clone()));
      engine.step();
    }
    outcome.losses.push_back(loss.item<double>());
    outcome.norms.push_back(*engine.get_global_grad_norm());
  }
  engine.destroy();
  outcome.parameters = parameters_of(*net);
  return outcome;
}

inline void expect_near(const Outcome& got, const Outcome& expected, double tolerance, bool has_all_samples) {
  for (size_t i = 0; i < expected.losses.size(); ++i) {
    if (has_all_samples) {
      EXPECT_NEAR(got.losses[i], expected.losses[i], tolerance * expected.losses[i]) << "step " << i;
    }
    EXPECT_NEAR(got.norms[i], expected.norms[i], tolerance * expected.norms[i]) << "step " << i;
  }
  for (const auto& [name, parameter] : expected.parameters) {
    const at::Tensor& own = got.parameters.at(name);
    ASSERT_EQ(own.sizes(), parameter.sizes()) << name;
    EXPECT_LE((own - parameter).norm().item<double>(), tolerance * parameter.norm().item<double>()) << name;
  }
}

inline void expect_parity(int data, int tensor, int stage, const Case& of = {}) {
  SCOPED_TRACE(str("data ", data, ", tensor ", tensor, ", stage ", stage));
  Outcome expected;
  run_ranks(1, [&](Rank& rank) { expected = train(rank.world(), settings(1, 1, 0), of); });
  std::mutex mutex;
  run_ranks(data * tensor, [&](Rank& rank) {
    const Outcome got = train(rank.world(), settings(data, tensor, stage, of), of);
    const std::lock_guard lock(mutex);
    expect_near(got, expected, 1e-5, data == 1);
  });
}

}  // namespace trireme::tensor_parity
