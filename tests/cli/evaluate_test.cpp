#include "cli/evaluate.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
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
        LanguageModel& model = *models[rank.id()];
        const auto loss_of = [&](const TokenBatch& batch) { return model.loss(batch.input, batch.target); };
        losses[rank.id()] = evaluate(model, loss_of, data, rank.world(), {.rank = rank.id(), .size = world},
                                     {.samples = samples, .micro_batch = 2});
      });
      // fp32 losses of 5.5 or so, averaged in another order.
      for (const double loss : losses) EXPECT_NEAR(loss, sum / samples, 1e-5) << samples << " on " << world;
    }
  }
}

// Ranks that share a sequence run the same batches, and count them once.
TEST(Evaluate, CountsTheBatchesOfRanksThatShareThemOnce) {
  const TemporaryFolder folder;
  const auto data =
      open_data({.path = folder.write("a.txt", std::string(400, 'x')), .seq = 16, .held_out_fraction = 0}).train;
  const ModelOptions options = GptOptions{.vocab_size = 256, .n_embd = 8, .n_layer = 1, .n_head = 1, .n_positions = 16};
  std::vector<int64_t> samples_of(4);
  run_ranks(4, [&](Rank& rank) {
    const auto model = make_language_model(options);
    const int place = rank.id() / 2;
    const auto loss_of = [&](const TokenBatch& batch) {
      samples_of[rank.id()] += batch.input.size(0);
      return at::full({}, place == 0 ? 1.0 : 4.0);
    };
    // Six samples by two: two rounds of place 0, one of place 1, which runs its second without counting it.
    const double loss =
        evaluate(*model, loss_of, data, rank.world(), {.rank = place, .size = 2}, {.samples = 6, .micro_batch = 2});
    EXPECT_DOUBLE_EQ(loss, (4 * 1.0 + 2 * 4.0) / 6);
  });
  EXPECT_EQ(samples_of, (std::vector<int64_t>{4, 4, 3, 3}));
}

}  // namespace
}  // namespace trireme::cli
