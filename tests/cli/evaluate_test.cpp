#include "cli/evaluate.h"

#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/cli/program.h"
#include "tests/support/run_ranks.h"

namespace trireme::cli {
namespace {

// Each sample counts once, also where the last round leaves a rank with less or nothing.
TEST(Evaluate, IsTheMeanOverTheFirstSamplesOnAnyNumberOfRanks) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 400; ++i) text += "line " + std::to_string(i * 7919 % 1000) + "\n";
  const auto data = open_data({.path = folder.write("a.txt", text), .seq = 16, .held_out_fraction = 0}).train;
  const ModelOptions options = LlamaOptions{.vocab_size = 256,
                                            .hidden_size = 32,
                                            .intermediate_size = 64,
                                            .num_hidden_layers = 1,
                                            .num_attention_heads = 2,
                                            .num_key_value_heads = 2};
  std::vector<std::shared_ptr<LanguageModel>> models;
  for (int i = 0; i < 3; ++i) models.push_back(make_language_model(options));
  const at::NoGradGuard no_grad;
  for (const auto& item : models[0]->named_parameters())
    for (int i = 1; i < 3; ++i) models[i]->named_parameters()[item.key()].copy_(item.value());

  for (const int64_t samples : {7, 1, 12}) {
    double sum = 0;
    for (int64_t i = 0; i < samples; ++i) {
      const auto [input, target] = data.batch({i});
      sum += models[0]->loss(input, target).item<double>();
    }
    for (const int world : {1, 2, 3}) {
      std::vector<double> losses(world);
      run_ranks(world, [&](Rank& rank) {
        losses[rank.id()] = evaluate(*models[rank.id()], data, rank.world(), {.samples = samples, .micro_batch = 2});
      });
      // fp32 losses of 5.5 or so, averaged in another order.
      for (const double loss : losses) EXPECT_NEAR(loss, sum / samples, 1e-5) << samples << " on " << world;
    }
  }
}

}  // namespace
}  // namespace trireme::cli
