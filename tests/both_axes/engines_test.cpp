// Engines whose ranks have parts of sequences and slices of layers: what tests/compose does not show of them.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/parity/cases.h"
#include "tests/support/run_ranks.h"
#include "tests/support/temporary_folder.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/engine/engine.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/models/gpt.h"

namespace trireme::both_axes {
namespace {

using namespace testing;

constexpr int64_t kVocab = 29, kLength = 13;
constexpr int kSamples = 4;  // of a step, one in each micro-batch

struct Layout {
  int data = 1, sequence = 1, tensor = 1;
  int stage = 0;
  const char* attention = "ulysses";

  int ranks() const { return data * sequence * tensor; }
  std::string text() const {
    return str("data ", data, ", sequence ", sequence, ", tensor ", tensor, ", ZeRO ", stage, ", ", attention);
  }
};

std::shared_ptr<LanguageModel> make_llama() {
  auto net = std::make_shared<LlamaImpl>(LlamaOptions{.vocab_size = kVocab,
                                                      .hidden_size = 16,
                                                      .intermediate_size = 25,
                                                      .num_hidden_layers = 2,
                                                      .num_attention_heads = 4,
                                                      .num_key_value_heads = 2,
                                                      .max_position_embeddings = 32});
  draw_weights(*net);
  return net;
}

std::shared_ptr<LanguageModel> make_gpt() {
  auto net = std::make_shared<GptImpl>(
      GptOptions{.vocab_size = kVocab, .n_embd = 16, .n_layer = 2, .n_head = 4, .n_positions = 32});
  draw_weights(*net);
  return net;
}

Json settings(const Layout& layout) {
  return {{"train_micro_batch_size_per_gpu", 1},
          {"gradient_accumulation_steps", kSamples / layout.data},
          {"gradient_clipping", 0.3},
          {"zero_optimization", {{"stage", layout.stage}}},
          {"sequence_parallel_size", layout.sequence},
          {"trireme", {{"sequence_attention", layout.attention}}},
          {"tensor_parallel", {{"autotp_size", layout.tensor}}},
          {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 0.01}, {"eps", 1e-3}}}}}};
}

InitializeOptions options_of(const Json& json, int ranks, const char* type = "llama") {
  Config config = config_from_json(json, ranks);
  config.pager.poison = true;
  config.pager.live_bytes = 0;
  config.pager.units.merge_below_bytes = 0;
  return {.config = config,
          .partition_model =
              PartitionModel{.model_type = type, .heads = 4, .key_value_heads = type == std::string("gpt2") ? 4 : 2},
          .takes_sizes_from_inputs = true};
}

/// A sample with more targets in its second half than in its first.
SequenceInputs sample(int64_t number) {
  const at::Tensor tokens = tokens_of({number, 0}, kVocab, {1, kLength + 1});
  SequenceInputs in{.input_ids = tokens.narrow(1, 0, kLength),
                    .labels = tokens.narrow(1, 1, kLength).clone(),
                    .position_ids = at::arange(kLength, at::kLong).unsqueeze(0)};
  in.labels.narrow(1, 0, number % 3 * 3).fill_(-100);
  return in;
}

at::Tensor loss_of(Engine& engine, LanguageModel& net, int64_t number, bool cuts = true) {
  const SequenceInputs in = cuts ? engine.cut(sample(number)) : sample(number);
  return net.loss(in.input_ids, in.labels, in.position_ids);
}

void train_step(Engine& engine, LanguageModel& net, int64_t step) {
  const DataPlace place = engine.data_place();
  for (int64_t micro = 0; micro < engine.gradient_accumulation_steps(); ++micro) {
    engine.backward(loss_of(engine, net, step * kSamples + micro * place.size + place.rank));
    engine.step();
  }
}

/// Masters and optimizer states of every parameter, whole. Collective.
std::map<std::string, at::Tensor> states_of(const torch::nn::Module& net) {
  std::map<std::string, at::Tensor> states;
  for (const auto& item : net.named_parameters()) {
    states[item.key()] = safe_get_full_fp32_param(item.value())->clone();
    for (const char* state : {"exp_avg", "exp_avg_sq"})
      states[item.key() + "." + state] = safe_get_full_optimizer_state(item.value(), state)->clone();
  }
  return states;
}

TEST(BothAxes, ACheckpointLoadsAtAnyLayoutBitByBit) {
  const std::vector<Layout> all = {{},
                                   {.sequence = 2, .stage = 3},
                                   {.tensor = 2, .stage = 2},
                                   {.sequence = 2, .tensor = 2, .stage = 3},
                                   {.sequence = 2, .tensor = 2, .stage = 1, .attention = "ring"},
                                   {.data = 2, .sequence = 2, .tensor = 2, .stage = 2}};
  const TemporaryFolder folder;
  std::map<std::string, at::Tensor> saved;
  const auto on = [&](const Layout& layout, const std::string& loads, const std::string& saves, bool trains) {
    SCOPED_TRACE(str(layout.text(), " loads ", loads));
    std::mutex mutex;
    std::map<std::string, at::Tensor> first;
    run_ranks(layout.ranks(), [&](Rank& rank) {
      at::set_num_threads(1);
      const auto net = make_llama();
      Engine engine(rank.world(), *net, options_of(settings(layout), layout.ranks()));
      if (!loads.empty()) {
        EXPECT_TRUE(engine.load_checkpoint(folder.path(), {.tag = loads}).has_value());
      }
      if (trains) {
        train_step(engine, *net, 0);
        train_step(engine, *net, 1);
      }
      engine.save_checkpoint(folder.path(), {.tag = saves});
      std::map<std::string, at::Tensor> own = states_of(*net);
      engine.destroy();
      for (const auto& [name, tensor] : parameters_of(*net)) own["weight of " + name] = tensor.clone();
      const std::lock_guard lock(mutex);
      if (trains && rank.id() == 0) first = own;
      if (trains) return;
      ASSERT_EQ(own.size(), saved.size());
      for (const auto& [name, tensor] : saved) EXPECT_TRUE(at::equal(own.at(name), tensor)) << name;
    });
    if (trains) saved = std::move(first);
  };
  for (size_t from = 0; from < all.size(); ++from) {
    on(all[from], "", str("of", from), /*trains=*/true);
    for (size_t to = 0; to < all.size(); ++to)
      on(all[to], str("of", from), str("of", from, "by", to), /*trains=*/false);
    // A checkpoint that another layout has saved again.
    on(all[3], str("of", from, "by", 5), str("of", from, "again"), /*trains=*/false);
  }
}

struct Outcome {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> gradients, weights;
};

struct Way {
  bool overlaps = false;  ///< tp_overlap_comm
  bool cuts = true;       ///< the program cuts its batches
};

Outcome train_gpt(const Layout& layout, const Way& way = {}) {
  Outcome outcome;
  run_ranks(layout.ranks(), [&](Rank& rank) {
    at::set_num_threads(1);
    const auto net = make_gpt();
    Json json = settings(layout);
    json["tensor_parallel"]["tp_overlap_comm"] = way.overlaps;
    json["gradient_clipping"] = 0.0;
    json["optimizer"] = {{"type", "SGD"}, {"params", {{"lr", 0.1}, {"momentum", 0.9}}}};
    json["gradient_accumulation_steps"] = 1;
    Engine engine(rank.world(), *net, options_of(json, layout.ranks(), "gpt2"));
    Outcome own;
    for (int64_t step = 0; step < 3; ++step) {
      own.losses.push_back(engine.backward(loss_of(engine, *net, step, way.cuts)).item<double>());
      if (step == 0)
        for (const auto& item : net->named_parameters())
          own.gradients[item.key()] = safe_get_full_grad(item.value())->clone();
      engine.step();
    }
    engine.destroy();
    own.weights = parameters_of(*net);
    if (rank.id() == layout.ranks() - 1) outcome = std::move(own);
  });
  return outcome;
}

void expect_near(const std::map<std::string, at::Tensor>& found, const std::map<std::string, at::Tensor>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_EQ(found.at(name).sizes(), tensor.sizes()) << name;
    // The bias of keys has a gradient of 0 but for rounding.
    EXPECT_LE((found.at(name) - tensor).norm().item<double>(), 1e-5 * tensor.norm().item<double>() + 1e-8) << name;
  }
}

/// Queries, keys and values in one matrix, and positions that are looked up.
TEST(BothAxes, AGptTrainsAsOneProcess) {
  const Outcome one = train_gpt({});
  for (const char* attention : {"ulysses", "ring"})
    for (const int stage : {0, 1, 2, 3}) {
      const Layout layout{.sequence = 2, .tensor = 2, .stage = stage, .attention = attention};
      SCOPED_TRACE(layout.text());
      const Outcome found = train_gpt(layout, {.overlaps = stage == 1, .cuts = stage != 0 || attention[0] == 'u'});
      for (size_t step = 0; step < one.losses.size(); ++step)
        EXPECT_NEAR(found.losses[step], one.losses[step], 1e-5) << step;
      expect_near(found.gradients, one.gradients);
      expect_near(found.weights, one.weights);
    }
}

/// Each rank along an axis draws otherwise for what is cut along it, and all alike for the rest.
TEST(BothAxes, RanksDrawAlikeWhereTheyHaveTheSame) {
  constexpr int kRanks = 4;
  std::vector<at::Tensor> of_whole(kRanks), of_tokens(kRanks), of_features(kRanks), of_both(kRanks);
  run_ranks(kRanks, [&](Rank& rank) {
    RankContext::of_this_thread().streams().use_own_generator(5);
    const auto net = make_llama();
    const Layout layout{.sequence = 2, .tensor = 2};
    Engine engine(rank.world(), *net, options_of(settings(layout), kRanks));
    const at::Tensor up = net->named_parameters()["model.layers.0.mlp.up_proj.weight"];
    const at::NoGradGuard no_grad;
    const auto id = static_cast<size_t>(rank.id());
    const at::Tensor whole = at::ones({64, 16}), tokens = engine.sequence()->cut(whole, 0);
    const auto kept = [&](const at::Tensor& x) {
      return engine.passes().whole(at::dropout(at::ones_like(x), 0.5, true)).ne(0);
    };
    of_whole[id] = kept(whole);
    of_tokens[id] = kept(at::linear(tokens, at::ones({3, 16})));
    of_features[id] = kept(at::linear(whole, up));
    of_both[id] = kept(at::linear(tokens, up));
  });
  for (const auto* all : {&of_whole, &of_tokens, &of_features, &of_both})
    for (int rank = 1; rank < kRanks; ++rank) EXPECT_TRUE(at::equal((*all)[rank], (*all)[0]));
  const auto differ = [](const at::Tensor& one, const at::Tensor& other) { return !at::equal(one, other); };
  EXPECT_TRUE(differ(of_tokens[0].narrow(0, 0, 32), of_tokens[0].narrow(0, 32, 32)));
  EXPECT_TRUE(differ(of_features[0].narrow(1, 0, 12), of_features[0].narrow(1, 12, 12)));
  std::vector<at::Tensor> quarters;
  for (const int row : {0, 32})
    for (const int column : {0, 12}) quarters.push_back(of_both[0].narrow(0, row, 32).narrow(1, column, 12));
  for (size_t one = 0; one < quarters.size(); ++one)
    for (size_t other = 0; other < one; ++other) EXPECT_TRUE(differ(quarters[one], quarters[other]));
}

/// The texts with which ranks refuse what `run` does, by rank.
std::vector<std::string> refusals(int ranks, const std::function<void(Rank&)>& run) {
  std::vector<std::string> texts(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](Rank& rank) {
    at::set_num_threads(1);
    try {
      run(rank);
    } catch (const Error& error) {
      texts[static_cast<size_t>(rank.id())] = error.what();
    }
  });
  return texts;
}

/// A program that computes with the sizes of its weights, as this module does, would take a slice's.
TEST(BothAxes, AModuleOfAnySizesIsRefusedByNameAndStaysAsItIs) {
  const Layout layout{.sequence = 2, .tensor = 2};
  for (const std::string& text : refusals(layout.ranks(), [&](Rank& rank) {
         const auto net = make_gpt();
         const auto before = parameters_of(*net);
         InitializeOptions options = options_of(settings(layout), layout.ranks(), "gpt2");
         options.takes_sizes_from_inputs = false;
         try {
           const Engine engine(rank.world(), *net, options);
         } catch (const ConfigError&) {
           for (const auto& [name, tensor] : parameters_of(*net)) EXPECT_TRUE(at::equal(tensor, before.at(name)));
           throw;
         }
       }))
    EXPECT_EQ(
        text,
        "axes \"sequence\" of 2 and \"tensor\" of 2 ranks: the program may compute with the sizes of a slice of a "
        "parameter, beside activations that say the whole's; where it reads sizes of its inputs alone, set "
        "InitializeOptions::takes_sizes_from_inputs, or make one of the two 1");
}

TEST(BothAxes, TokensThatSlicesShareAreRefusedByName) {
  const Layout layout{.sequence = 2, .tensor = 2};
  Json json = settings(layout);
  json["tensor_parallel"]["sequence_parallel"] = true;
  for (const std::string& text : refusals(layout.ranks(), [&](Rank& rank) {
         const auto net = make_llama();
         const Engine engine(rank.world(), *net, options_of(json, layout.ranks()));
       }))
    EXPECT_EQ(text,
              "tensor_parallel.sequence_parallel: on 2 ranks along \"tensor\" and 2 along \"sequence\" tokens would be "
              "cut twice, which is not there yet; remove the key, or make one of the two 1");
}

struct Mistake {
  std::string what, named;
  std::function<void(LanguageModel&, const Rank&)> in_model = {};
  std::function<int64_t(const Rank&)> sample = {};
};

/// A gradient of `name` that the ranks which `is_other` chooses have twice.
std::function<void(LanguageModel&, const Rank&)> doubled(const char* name, std::function<bool(int)> is_other) {
  return [name, is_other = std::move(is_other)](LanguageModel& net, const Rank& rank) {
    if (is_other(rank.id()))
      net.named_parameters()[name].register_hook([](const at::Tensor& gradient) { return gradient * 2; });
  };
}

TEST(BothAxes, WhatOneRankDoesAloneIsNamedBeforeTheFirstUpdate) {
  // Ranks 0 and 1, and 2 and 3, share tokens; 0 and 2, and 1 and 3, slices.
  const std::vector<Mistake> all = {{.what = "nothing", .named = ""},
                                    {.what = "another gradient of a whole parameter",
                                     .named = "\"model.norm.weight\" and other gradients of them",
                                     .in_model = doubled("model.norm.weight", [](int rank) { return rank == 1; })},
                                    {.what = "the same on one place of \"tensor\"",
                                     .named = "\"model.norm.weight\" and other gradients of them",
                                     .in_model = doubled("model.norm.weight", [](int rank) { return rank % 2 == 1; })},
                                    {.what = "another batch along \"tensor\"",
                                     .named = "the loss is",
                                     .sample = [](const Rank& rank) { return rank.id() % 2; }},
                                    {.what = "another batch along \"sequence\"",
                                     .named = "cut: input_ids has other values",
                                     .sample = [](const Rank& rank) { return rank.id() / 2; }}};
  for (const Mistake& mistake : all)
    for (const int stage : {0, 3}) {
      SCOPED_TRACE(str(mistake.what, ", ZeRO ", stage));
      const Layout layout{.sequence = 2, .tensor = 2, .stage = stage};
      for (const std::string& text : refusals(layout.ranks(), [&](Rank& rank) {
             const auto net = make_llama();
             Json json = settings(layout);
             json["gradient_accumulation_steps"] = 1;
             Engine engine(rank.world(), *net, options_of(json, layout.ranks()));
             if (mistake.in_model) mistake.in_model(*net, rank);
             engine.backward(loss_of(engine, *net, mistake.sample ? mistake.sample(rank) : 0));
             engine.step();
           })) {
        EXPECT_EQ(text.empty(), mistake.named.empty()) << text;
        EXPECT_NE(text.find(mistake.named), std::string::npos) << text;
      }
    }
}

/// The exchanges of rank 0 in a step of one sample; a Llama of two layers.
std::vector<ExchangeRow> exchanges_of_step(const Layout& layout) {
  Json json = settings(layout);
  json["gradient_accumulation_steps"] = 1;
  std::vector<ExchangeRow> rows;
  run_ranks(layout.ranks(), [&](Rank& rank) {
    const auto net = make_llama();
    Engine engine(rank.world(), *net, options_of(json, layout.ranks()));
    const auto step = [&] {
      SequenceInputs in = engine.cut(sample(0));
      engine.backward(net->loss(in.input_ids, in.labels, in.position_ids));
      engine.step();
    };
    step();
    EXPECT_TRUE(engine.passes().exchanges().empty()) << "nothing is counted that nobody asked for";
    engine.passes().count_exchanges();
    step();
    if (rank.id() == 0) rows = engine.passes().exchanges();
    engine.passes().count_exchanges(false);
    step();
    EXPECT_TRUE(engine.passes().exchanges().empty());
  });
  return rows;
}

constexpr int64_t kFloat = 4, kHidden = 16, kLayers = 2;
constexpr const char* kAttention = "aten::scaled_dot_product_attention";

/// By the cost line of an all-reduce over two ranks, which sends as many bytes as there are: a layer adds up the hidden
/// states of `tokens` tokens twice in forward, and twice their gradients.
std::vector<ExchangeRow> sums_of_slices(int64_t tokens) {
  std::vector<ExchangeRow> rows;
  const auto add = [&](const std::string& what, int64_t exchanges, int64_t bytes) {
    rows.push_back({.axis = "tensor", .what = what, .exchanges = exchanges, .bytes_sent = bytes});
  };
  const int64_t bytes = tokens * kHidden * kFloat;
  add("aten::embedding of \"model.embed_tokens.weight\" in forward", 1, bytes);
  for (int64_t layer = 0; layer < kLayers; ++layer)
    for (const char* what : {"self_attn.o_proj.weight\" in forward", "mlp.down_proj.weight\" in forward",
                             "self_attn.q_proj.weight\" in backward", "mlp.gate_proj.weight\" in backward"})
      add(str("aten::linear of \"model.layers.", layer, ".", what), 1, bytes);
  add("aten::linear of \"lm_head.weight\" in backward", 1, bytes);
  add("aten::cross_entropy_loss in forward", 2, 3 * tokens * kFloat);  // the greatest logit, two sums over classes
  return rows;
}

/// A sum and a count in float64, and their gradients.
std::vector<ExchangeRow> sums_of_tokens() {
  std::vector<ExchangeRow> rows;
  for (const char* direction : {"forward", "backward"})
    rows.push_back({.axis = "sequence",
                    .what = str("aten::cross_entropy_loss in ", direction),
                    .exchanges = 1,
                    .bytes_sent = 2 * 8});
  return rows;
}

ExchangeRow of_attention(const char* direction, ExchangeWay way, int64_t exchanges_of_layer, int64_t bytes_of_layer) {
  return {.axis = "sequence",
          .what = str(kAttention, " in ", direction),
          .way = way,
          .exchanges = kLayers * exchanges_of_layer,
          .bytes_sent = kLayers * bytes_of_layer};
}

void expect_rows(const std::vector<ExchangeRow>& got, const std::vector<std::vector<ExchangeRow>>& expected) {
  std::vector<ExchangeRow> all;
  for (const std::vector<ExchangeRow>& some : expected) all.insert(all.end(), some.begin(), some.end());
  EXPECT_EQ(got, by_bytes(all)) << text_of(got) << "instead of\n" << text_of(all);
}

TEST(ExchangesOfAStep, OfSlicesAreFourSumsOfAllTokensALayer) {
  expect_rows(exchanges_of_step({.tensor = 2}), {sums_of_slices(kLength)});
}

// Blocks of the rank that has seven of 13 tokens, by which all are as large; four heads, two of keys.
constexpr int64_t kMost = (kLength + 1) / 2, kBytesOfQueries = kMost * kHidden * kFloat;

/// Half of each rank's queries, keys, values and results goes to the other rank.
TEST(ExchangesOfAStep, OfHeadsAreFourRecutsALayerEachWay) {
  constexpr int64_t kSent = (2 * kBytesOfQueries + 2 * kBytesOfQueries / 2) / 2;
  expect_rows(exchanges_of_step({.sequence = 2}), {sums_of_tokens(),
                                                   {of_attention("forward", ExchangeWay::kRecut, 4, kSent),
                                                    of_attention("backward", ExchangeWay::kRecut, 4, kSent)}});
}

/// A rank hands its keys and values on, in backward again; their gradients, which go home, take two messages.
TEST(ExchangesOfAStep, OfARingAreKeysAndValues) {
  constexpr int64_t kBoth = 2 * kBytesOfQueries / 2;
  expect_rows(exchanges_of_step({.sequence = 2, .attention = "ring"}),
              {sums_of_tokens(),
               {of_attention("forward", ExchangeWay::kRing, 1, kBoth),
                of_attention("backward", ExchangeWay::kRing, 3, 3 * kBoth)}});
}

/// Slices add up a rank's own tokens, six on rank 0. A slice has two heads, and one of keys, which all tokens attend
/// with: it is gathered, and its gradient scattered.
TEST(ExchangesOfAStep, OfBothAxesAreEachAxisOfTheOthersPart) {
  constexpr int64_t kSent = 2 * kBytesOfQueries / 2 / 2, kKeys = 2 * kBytesOfQueries / 2 / 2;
  expect_rows(
      exchanges_of_step({.sequence = 2, .tensor = 2}),
      {sums_of_slices(kLength / 2),
       sums_of_tokens(),
       {of_attention("forward", ExchangeWay::kRecut, 2, kSent), of_attention("backward", ExchangeWay::kRecut, 2, kSent),
        of_attention("forward", ExchangeWay::kGather, 2, kKeys),
        of_attention("backward", ExchangeWay::kScatter, 2, kKeys)}});
}

}  // namespace
}  // namespace trireme::both_axes
