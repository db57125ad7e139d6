// Programs of libtorch operators train on slices of their parameters as one rank trains on whole ones.
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/einsum.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/nll_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "tests/tensor/sliced_programs.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"
#include "trireme/recompute/recompute.h"
#include "trireme/tensor/partition_rule.h"
#include "trireme/tensor/tensor_parallel.h"

namespace trireme {
namespace {

using namespace sliced;

TEST(TensorPass, ColumnsThenRows) {
  expect_same({.shapes = {{"up", {2 * kHidden, kHidden}},
                          {"up_bias", {2 * kHidden}},
                          {"down", {kHidden, 2 * kHidden}},
                          {"down_bias", {kHidden}},
                          {"norm", {kHidden}}},
               .cuts = {{"up", {0}}, {"up_bias", {0}}, {"down", {1}}},
               .loss = [](const Weights& w) {
                 at::Tensor x = at::rms_norm(input(), {kHidden}, w.at("norm"), 1e-5);
                 x = x +
                     at::linear(at::gelu(at::linear(x, w.at("up"), w.at("up_bias"))), w.at("down"), w.at("down_bias"));
                 return squares(x);
               }});
}

/// As C++'s torch::nn::Linear has it.
TEST(TensorPass, ProductsWithTransposedWeights) {
  expect_same({.shapes = {{"up", {2 * kHidden, kHidden}},
                          {"up_bias", {2 * kHidden}},
                          {"down", {kHidden, 2 * kHidden}},
                          {"down_bias", {kHidden}}},
               .cuts = {{"up", {0}}, {"up_bias", {0}}, {"down", {1}}},
               .loss = [](const Weights& w) {
                 at::Tensor x = input().view({-1, kHidden});
                 x = at::addmm(w.at("up_bias"), x, w.at("up").t());
                 at::Tensor y = at::gelu(x.view({kBatch, kLength, -1})).matmul(w.at("down").t());
                 y += w.at("down_bias");
                 return squares(y);
               }});
}

Program attention(int64_t key_heads, const std::function<at::Tensor(at::Tensor, at::Tensor, at::Tensor)>& attend,
                  int64_t shared_by = 1) {
  const int64_t keys = key_heads * kHeadSize;
  return {.shapes = {{"q", {kHidden, kHidden}},
                     {"k", {keys, kHidden}},
                     {"v_bias", {keys}},
                     {"v", {keys, kHidden}},
                     {"o", {kHidden, kHidden}},
                     {"q_norm", {kHeadSize}},
                     {"in", {kHidden}}},
          .cuts = {{"q", {0, 1, kHeadSize}},
                   {"k", {0, 1, kHeadSize, false, shared_by}},
                   {"v_bias", {0, 1, kHeadSize, false, shared_by}},
                   {"v", {0, 1, kHeadSize, false, shared_by}},
                   {"o", {1, 1, kHeadSize}}},
          .loss = [attend](const Weights& w) {
            const at::Tensor x = at::layer_norm(input(), {kHidden}, w.at("in"));
            const at::Tensor q = at::rms_norm(at::linear(x, w.at("q")).unflatten(-1, {-1, kHeadSize}), {kHeadSize},
                                              w.at("q_norm"), 1e-5);
            const at::Tensor attended = attend(q.transpose(1, 2), heads_of(at::linear(x, w.at("k"))),
                                               heads_of(at::linear(x, w.at("v"), w.at("v_bias"))));
            return squares(x + at::linear(attended.transpose(1, 2).flatten(2), w.at("o")));
          }};
}

at::Tensor by_operator(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  return at::scaled_dot_product_attention(q, k, v, {}, 0, /*is_causal=*/true, {}, /*enable_gqa=*/true);
}
at::Tensor by_products(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  const at::Tensor mask = at::randn({kLength, kLength}, at::detail::createCPUGenerator(9));
  return at::matmul(at::softmax(at::matmul(q, k.transpose(-2, -1)) * 0.5 + mask, -1), v);
}

TEST(TensorPass, AttentionOnOwnHeads) {
  expect_same(attention(kHeads, by_operator));
  expect_same(attention(kHeads, by_products));
}

TEST(TensorPass, FewerKeyHeads) {
  expect_same(attention(3, by_operator), 3);
  expect_same(attention(2, by_operator), 2);
  // Heads 0 to 2 attend with keys 0 and 1, heads 3 to 5 with keys 1 and 2: keys are cut otherwise.
  expect_same(attention(3, by_operator), 2);
  // One key head for all ranks, which each have it.
  expect_same(attention(1, by_operator, /*shared_by=*/2), 2);
  expect_same(attention(1, by_operator, /*shared_by=*/3), 3);
  // Two ranks for each of two key heads; query heads 0, 1-2, 3, 4-5.
  expect_same(attention(2, by_operator, /*shared_by=*/2), 4);
  // Gathered: a key head comes from the first of two ranks.
  const auto flipped = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return by_operator(q, k.flip(1).flip(1), v);
  };
  expect_same(attention(2, flipped, /*shared_by=*/2), 4);
}

TEST(TensorPass, RepeatedKeyHeads) {
  const auto expanded = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    const auto repeat = [&](const at::Tensor& x) {
      const int64_t heads = x.size(1);
      return x.unsqueeze(2)
          .expand({kBatch, heads, 2, kLength, kHeadSize})
          .reshape({kBatch, heads * 2, kLength, kHeadSize});
    };
    return by_products(q, repeat(k), repeat(v));
  };
  expect_same(attention(3, expanded), 3);
  const auto interleaved = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    return by_products(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1));
  };
  expect_same(attention(3, interleaved), 3);
  expect_same(attention(3, interleaved), 2);
}

/// Sizes of the whole, written down by the program.
TEST(TensorPass, ConstantsOfTheWhole) {
  Program program = attention(kHeads, by_operator);
  program.loss = [](const Weights& w) {
    const at::Tensor x = input();
    const auto heads = [&](const char* name) {
      return at::linear(x, w.at(name)).view({kBatch, -1, kHeads, kHeadSize}).transpose(1, 2);
    };
    const at::Tensor attended = by_operator(heads("q") * w.at("q_norm"), heads("k"), heads("v"));
    return squares(at::linear(attended.transpose(1, 2).reshape({kBatch, kLength, kHidden}), w.at("o")) * w.at("in") +
                   w.at("v_bias").sum());
  };
  expect_same(program);
  // Batches and heads in one dim.
  program.loss = [](const Weights& w) {
    const at::Tensor x = input();
    const auto heads = [&](const char* name) {
      return at::linear(x, w.at(name))
          .view({kBatch, kLength, kHeads, kHeadSize})
          .transpose(1, 2)
          .reshape({kBatch * kHeads, kLength, kHeadSize});
    };
    const at::Tensor alibi = at::arange(kBatch * kHeads, at::kFloat).view({kBatch * kHeads, 1, 1}) * 0.1;
    const at::Tensor scores = at::baddbmm(alibi, heads("q"), heads("k").transpose(1, 2), 1, 1);
    const at::Tensor attended = at::bmm(at::softmax(scores, -1), heads("v")).view({kBatch, kHeads, kLength, kHeadSize});
    return squares(at::linear(attended.transpose(1, 2).reshape({kBatch, kLength, kHidden}), w.at("o")) * w.at("in") +
                   w.at("v_bias").mean() + w.at("q_norm").sum());
  };
  expect_same(program);
  expect_same(program, 6);  // one head each: a batch of one head looks like a head of a batch
}

Program packed(const std::function<std::vector<at::Tensor>(const at::Tensor&)>& divide) {
  return {.shapes = {{"qkv", {3 * kHidden, kHidden}}, {"bias", {3 * kHidden}}, {"o", {kHidden, kHidden}}},
          .cuts = {{"qkv", {0, 3, kHeadSize}}, {"bias", {0, 3, kHeadSize}}, {"o", {1, 1, kHeadSize}}},
          .loss = [divide](const Weights& w) {
            const at::Tensor x = input();
            const std::vector<at::Tensor> parts = divide(at::linear(x, w.at("qkv"), w.at("bias")));
            const at::Tensor attended = by_operator(heads_of(parts[0]), heads_of(parts[1]), heads_of(parts[2]));
            return squares(x + at::linear(attended.transpose(1, 2).flatten(2), w.at("o")));
          }};
}

TEST(TensorPass, PackedProjections) {
  expect_same(packed([](const at::Tensor& x) { return x.chunk(3, -1); }));
  expect_same(packed([](const at::Tensor& x) { return x.split(kHidden, -1); }));
  expect_same(packed([](const at::Tensor& x) { return x.split_with_sizes({kHidden, kHidden, kHidden}, 2); }));
  expect_same(packed([](const at::Tensor& x) {
    return std::vector{x.slice(-1, 0, kHidden), x.slice(-1, kHidden, 2 * kHidden), x.slice(-1, 2 * kHidden)};
  }));
  // Sizes that the program has read, of this rank.
  const Program local = packed([](const at::Tensor& x) {
    const int64_t size = x.size(-1) / 3;
    return std::vector{x.narrow(-1, 0, size), x.narrow(-1, size, size), x.narrow(-1, 2 * size, size)};
  });
  expect_same(local, 2);
  expect_same(local, 3);
  const Program stacked = packed([](const at::Tensor& x) {
    const at::Tensor apart = x.view({kBatch, kLength, 3, kHeads, kHeadSize}).permute({2, 0, 1, 3, 4});
    return std::vector{apart[0].flatten(2), apart[1].flatten(2), apart[2].flatten(2)};
  });
  expect_same(stacked);
}

/// Query, key and value of each head stand side by side.
TEST(TensorPass, InterleavedProjections) {
  Program program = packed({});
  program.cuts = {{"qkv", {0, 1, 3 * kHeadSize}}, {"bias", {0, 1, 3 * kHeadSize}}, {"o", {1, 1, kHeadSize}}};
  program.loss = [](const Weights& w) {
    const at::Tensor x = input();
    const at::Tensor qkv =
        at::linear(x, w.at("qkv"), w.at("bias")).view({kBatch, kLength, -1, 3 * kHeadSize}).transpose(1, 2);
    const auto parts = qkv.chunk(3, -1);
    return squares(at::linear(by_operator(parts[0], parts[1], parts[2]).transpose(1, 2).flatten(2), w.at("o")));
  };
  expect_same(program);
}

Program language_model(double smoothing, bool is_tied = false) {
  Program program{.shapes = {{"table", {kVocab, kHidden}}, {"head", {kVocab, kHidden}}, {"norm", {kHidden}}},
                  .cuts = {{"table", {0}}, {"head", {0}}}};
  if (is_tied) {
    program.shapes.erase("head");
    program.cuts.erase("head");
  }
  program.loss = [smoothing, is_tied](const Weights& w) {
    const at::Tensor x = at::embedding(w.at("table"), tokens()) * w.at("norm");
    const at::Tensor logits = at::linear(x, w.at(is_tied ? "table" : "head"));
    at::Tensor labels = tokens().clone();
    labels.select(1, 2).fill_(-100);
    return at::cross_entropy_loss(logits.slice(1, 0, -1).reshape({-1, kVocab}), labels.slice(1, 1).reshape(-1), {},
                                  at::Reduction::Mean, -100, smoothing);
  };
  return program;
}

TEST(TensorPass, VocabularyParallelLanguageModel) {
  expect_same(language_model(0));
  expect_same(language_model(0.1));
  expect_same(language_model(0, /*is_tied=*/true));
}

TEST(TensorPass, OtherLossesGatherLogits) {
  Program program = language_model(0);
  program.loss = [](const Weights& w) {
    const at::Tensor logits = at::linear(at::embedding(w.at("table"), tokens()) * w.at("norm"), w.at("head"));
    const at::Tensor logs = at::log_softmax(logits.view({-1, kVocab}), -1);
    return at::nll_loss(logs, tokens().view(-1)) + logits.logsumexp(-1).mean() * 0.01 + logits.select(-1, 3).mean();
  };
  expect_same(program);
}

TEST(TensorPass, VectorsOfAnEmbeddingAreCut) {
  Program program = language_model(0);
  program.cuts = {{"table", {1}}, {"head", {0, 1, 1, /*gathers_output=*/true}}};
  expect_same(program);
  program.cuts = {{"table", {1, 1, 1, /*gathers_output=*/true}}, {"head", {1}}};
  expect_same(program);
}

TEST(TensorPass, WhatIsNotKnownOfSlicesRunsOnWholes) {
  expect_same({.shapes = {{"up", {2 * kHidden, kHidden}},
                          {"norm", {2 * kHidden}},
                          {"down", {kHidden, 2 * kHidden}},
                          {"other", {kHidden, kHidden}}},
               .cuts = {{"up", {0}}, {"down", {1}}, {"other", {0}}},
               .loss = [](const Weights& w) {
                 at::Tensor y = at::linear(input(), w.at("up"));
                 y = at::layer_norm(y, {2 * kHidden}, w.at("norm"));  // over features that are cut
                 y = y + y.mean(-1, true) + y.flip(-1) + y.roll(3, -1) + y.cumsum(-1) * 0.01;
                 at::Tensor z = at::linear(y.softmax(-1), w.at("down"));  // whole features meet rows
                 z = at::einsum("bsh,oh->bso", {z, w.at("other")});
                 return squares(z) + squares(w.at("other").t().matmul(w.at("other"))) + w.at("up").norm();
               }});
}

/// A program fills a tensor of its own piece by piece, as latent attention makes its keys: what it has written is not
/// taken for a copy.
TEST(TensorPass, PiecesWrittenIntoAWholeTensor) {
  expect_same({.shapes = {{"up", {2 * kHidden, kHidden}}, {"down", {kHidden, 2 * kHidden}}},
               .cuts = {{"up", {0}}, {"down", {1}}},
               .loss = [](const Weights& w) {
                 const at::Tensor y = at::linear(input(), w.at("up"));
                 const at::Tensor z = at::empty({kBatch, kLength + 2, 2 * kHidden});
                 z.narrow(1, 0, kLength).copy_(y);
                 z.narrow(1, kLength, 1).copy_(y.mean(1, true));
                 z.select(1, kLength + 1).copy_(at::ones({2 * kHidden}));
                 return squares(at::linear(z.mul_(2).sin(), w.at("down")));
               }});
}

TEST(TensorPass, ProductsByLabels) {
  const auto grouped = [](const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
    const int64_t groups = 3, per_group = kHeads / groups;
    const at::Tensor queries = q.reshape({kBatch, groups, per_group, kLength, kHeadSize});
    const at::Tensor scores = at::einsum("bghqd,bgkd->bghqk", {queries, k});
    return at::einsum("bghqk,bgkd->bghqd", {scores.softmax(-1), v}).reshape({kBatch, kHeads, kLength, kHeadSize});
  };
  expect_same(attention(3, grouped), 3, {&TensorParallel::give_parts});
  expect_same(attention(3, grouped), 3);
  expect_same({.shapes = {{"w", {kHeads, kHidden, kHeadSize}}, {"o", {kHeads, kHeadSize, kHidden}}, {"n", {kHeadSize}}},
               .cuts = {{"w", {0}}, {"o", {0}}},
               .loss = [](const Weights& w) {
                 const at::Tensor x = at::einsum("bsh,nhd->bnsd", {input(), w.at("w")});
                 const at::Tensor y = at::einsum("bnsd,nde,d->bse", {x.tanh(), w.at("o"), w.at("n")});
                 return squares(y) + at::einsum("nhd->hd", {w.at("w")}).exp().sum() * 0.01;
               }});
}

TEST(TensorPass, JoinsOfSlices) {
  expect_same({.shapes = {{"a", {kHidden, kHidden}},
                          {"b", {kHidden, kHidden}},
                          {"c", {kHidden}},
                          {"o", {kHidden, 2 * kHidden}},
                          {"p", {kHidden, kHidden}}},
               .cuts = {{"a", {0}}, {"b", {0}}, {"o", {1}}, {"p", {1}}},
               .loss = [](const Weights& w) {
                 const at::Tensor a = at::linear(input(), w.at("a")), b = at::linear(input(4), w.at("b"));
                 const at::Tensor both = at::stack({a, b}), joined = at::cat({a, b}, 1);
                 const at::Tensor wide = at::cat({a, b + w.at("c")}, -1);
                 return squares(at::linear(both * w.at("c"), w.at("p"))) + squares(at::linear(joined, w.at("p"))) +
                        squares(at::linear(wide, w.at("o"))) + (a * input(6)).sum() + std::get<0>(a.max(-1)).sum();
               }});
}

TEST(TensorPass, Recomputation) {
  Program program = attention(kHeads, by_operator);
  const auto plain = program.loss;
  program.loss = [plain](const Weights& w) {
    const auto body = [&](const at::Tensor& scale) { return plain(w) * scale; };
    const at::Tensor one = at::ones({}, at::TensorOptions().requires_grad(true));
    return recompute({.name = "all"}, body, one);
  };
  expect_same(program, 2);
}

/// Megatron's count: in a block of attention and MLP two all-reduces of [B, S, H] in forward and two in backward.
TEST(TensorPass, ExchangesOfABlockAreCounted) {
  Program program = attention(kHeads, by_operator);
  program.shapes["up"] = program.shapes["gate"] = {2 * kHidden, kHidden};
  program.shapes["down"] = {kHidden, 2 * kHidden};
  program.cuts["up"] = program.cuts["gate"] = {0};
  program.cuts["down"] = {1};
  program.loss = [](const Weights& w) {
    at::Tensor x = input().requires_grad_() * w.at("in");
    at::Tensor y = at::layer_norm(x, {kHidden});
    const at::Tensor attended = by_operator(heads_of(at::linear(y, w.at("q"))), heads_of(at::linear(y, w.at("k"))),
                                            heads_of(at::linear(y, w.at("v"))));
    x = x + at::linear(attended.transpose(1, 2).flatten(2), w.at("o"));
    y = at::layer_norm(x, {kHidden});
    x = x + at::linear(at::silu(at::linear(y, w.at("gate"))) * at::linear(y, w.at("up")), w.at("down"));
    return squares(x) + 0 * (w.at("v_bias").sum() + w.at("q_norm").sum());
  };
  program.cuts.erase("v_bias");
  constexpr int kRanks = 2;
  run_ranks(kRanks, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    Weights weights = whole_weights(program);
    for (auto& [name, weight] : weights)
      if (const auto cut = program.cuts.find(name); cut != program.cuts.end()) {
        const auto parts = parts_of(program.shapes.at(name), cut->second, kRanks);
        weight = part_of(weight, parts[static_cast<size_t>(rank.id())]).contiguous();
        parallel.add(weight, parts);
      }
    for (auto& [name, weight] : weights) weight.requires_grad_();
    const CommCounters before = rank.world().counters();
    const at::Tensor loss = program.loss(weights);
    const CommCounters forward = rank.world().counters();
    torch::autograd::backward({loss}, {});
    const CommCounters backward = rank.world().counters();
    constexpr int64_t kBytes = 2 * (kRanks - 1) * kBatch * kLength * kHidden * 4 / kRanks;
    EXPECT_EQ(forward.calls - before.calls, 2);
    EXPECT_EQ(forward.bytes_sent - before.bytes_sent, 2 * kBytes);
    EXPECT_EQ(backward.calls - forward.calls, 2);
    EXPECT_EQ(backward.bytes_sent - forward.bytes_sent, 2 * kBytes);
  });
}

constexpr int64_t kRows = 2 * 350, kLargeWide = 384;

/// Products whose sums are large enough to be exchanged by pieces, alone and computed again in backward.
TEST(TensorPass, LargeSumsAreAddedUpByPieces) {
  const auto loss = [](const Weights& w) {
    const at::Tensor x = at::randn({2, kRows / 2, kHidden}, at::detail::createCPUGenerator(3)) * w.at("n");
    const at::Tensor y = at::linear(at::gelu(at::linear(x, w.at("up"))), w.at("down"), w.at("bias"));
    // As GPT-2 writes its layers: a weight that lies the other way round, and a term.
    const at::Tensor z = at::addmm(w.at("bias"), at::linear(y, w.at("next")).flatten(0, 1).tanh(), w.at("conv"));
    return at::layer_norm(y, {kLargeWide}).pow(2).mean() + z.pow(2).mean() + y.sin().sum() / y.numel();
  };
  Program program = {.shapes = {{"up", {2 * kHidden, kHidden}},
                                {"down", {kLargeWide, 2 * kHidden}},
                                {"bias", {kLargeWide}},
                                {"next", {kHidden, kLargeWide}},
                                {"conv", {kHidden, kLargeWide}},
                                {"n", {kHidden}}},
                     .cuts = {{"up", {0}}, {"down", {1}}, {"next", {0}}, {"conv", {0}}},
                     .loss = loss};
  for (const int ranks : {2, 3}) {
    SCOPED_TRACE("ranks " + std::to_string(ranks));
    expect_same(program, ranks, {&TensorParallel::overlap_sums});
    expect_same(program, ranks, {&TensorParallel::give_parts, &TensorParallel::overlap_sums});
  }
  program.loss = [loss](const Weights& w) {
    const auto body = [&](const at::Tensor& n) {
      Weights inner = w;
      inner["n"] = n;
      return loss(inner);
    };
    return recompute({.name = "all"}, body, w.at("n"));
  };
  expect_same(program, 2, {&TensorParallel::overlap_sums});
}

/// As many bytes as one sum moves, in four calls; a small product is one.
TEST(TensorPass, PiecesOfASumMoveTheBytesOfOne) {
  constexpr int kRanks = 2;
  run_ranks(kRanks, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    parallel.overlap_sums();
    const auto parts = parts_of({kLargeWide, kHidden}, {1}, kRanks);
    const at::Tensor down = at::ones(local_shape(parts[0])).requires_grad_();
    parallel.add(down, parts);
    const auto calls_of = [&](int64_t count) {
      const CommCounters before = rank.world().counters();
      const at::Tensor sum = at::linear(at::ones({count, kHidden}), down);
      EXPECT_TRUE(at::allclose(sum, at::full({count, kLargeWide}, static_cast<double>(kHidden))));
      const CommCounters after = rank.world().counters();
      EXPECT_EQ(after.bytes_sent - before.bytes_sent, 2 * (kRanks - 1) * count * kLargeWide * 4 / kRanks);
      return after.calls - before.calls;
    };
    EXPECT_EQ(calls_of(kRows), 4);
    EXPECT_EQ(calls_of(16), 1);
    EXPECT_EQ(parallel.exchange_problem(), "");
    EXPECT_EQ(calls_of(kRows), 4);
  });
}

/// Weights whose gradient nobody asks for, bf16 by autocast, and gradients of gradients.
TEST(TensorPass, PiecesOfASumHaveTheDtypeAndGradientsOfOne) {
  run_ranks(2, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    const auto parts = parts_of({kLargeWide, kHidden}, {1}, 2);
    const at::Tensor whole = at::randn({kLargeWide, kHidden}, at::detail::createCPUGenerator(5));
    const at::Tensor down = part_of(whole, parts[static_cast<size_t>(rank.id())]).contiguous();
    parallel.add(down, parts);
    const at::Tensor x = at::randn({2 * kRows, kHidden}, at::detail::createCPUGenerator(6)).requires_grad_();
    const auto gradients = [&](bool is_frozen) {
      down.requires_grad_(!is_frozen);
      at::autocast::set_autocast_enabled(at::kCPU, true);
      const at::Tensor sum = at::linear(x, down), again = at::linear(x.tanh(), down);
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
      EXPECT_EQ(sum.scalar_type(), at::kBFloat16);
      std::vector<at::Tensor> of = {x};
      if (!is_frozen) of.push_back(down);
      return torch::autograd::grad({sum.to(at::kFloat).sin().mean() + again.to(at::kFloat).pow(2).mean()}, of);
    };
    const std::vector<std::vector<at::Tensor>> at_once = {gradients(false), gradients(true)};
    parallel.overlap_sums();
    const std::vector<std::vector<at::Tensor>> by_pieces = {gradients(false), gradients(true)};
    for (size_t frozen = 0; frozen < 2; ++frozen)
      for (size_t i = 0; i < at_once[frozen].size(); ++i)
        EXPECT_LT(distance(by_pieces[frozen][i], at_once[frozen][i], at_once[frozen][i]), 1e-2)
            << "frozen " << frozen << ", " << i;
    const at::Tensor sum = at::linear(x, down).pow(2).mean();
    EXPECT_THROW((void)torch::autograd::grad({sum}, {x}, {}, std::nullopt, /*create_graph=*/true), StateError);
  });
}

/// The same bytes where ranks have some tokens each between layers: reduce-scatters in place of halves of all-reduces,
/// all-gathers in place of the others. A scale of every token has a sum of its gradient.
TEST(TensorPass, ShardedTokensMoveTheBytesOfWholeOnes) {
  constexpr int kRanks = 2;
  constexpr int64_t kTokens = 4, kWide = 2 * kHidden;
  run_ranks(kRanks, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    parallel.give_parts();
    parallel.shard_tokens();
    const auto add = [&](const std::vector<int64_t>& shape, int dim) {
      const auto parts = parts_of(shape, {dim}, kRanks);
      const at::Tensor part = at::ones(local_shape(parts[0])) * 0.1;
      parallel.add(part, parts);
      return part.requires_grad_();
    };
    const at::Tensor table = add({kVocab, kHidden}, 0);
    const at::Tensor up = add({kWide, kHidden}, 0), down = add({kHidden, kWide}, 1);
    const at::Tensor up2 = add({kWide, kHidden}, 0), down2 = add({kHidden, kWide}, 1);
    const at::Tensor head = add({kVocab, kHidden}, 0);
    const at::Tensor ids = at::ones({kBatch, kTokens}, at::kLong);
    const auto sent = [&] { return rank.world().counters().bytes_sent; };
    const auto block = [](const at::Tensor& x, const at::Tensor& first, const at::Tensor& second) {
      return x + at::linear(at::gelu(at::linear(at::layer_norm(x, {kHidden}), first)), second);
    };
    constexpr int64_t kHalf = (kRanks - 1) * kBatch * kTokens * kHidden * 4 / kRanks;  // of an all-reduce
    int64_t before = sent();
    at::Tensor x = at::embedding(table, ids);
    EXPECT_EQ(PartTensor::of(x)->local().size(1), kTokens / kRanks);
    EXPECT_EQ(sent() - before, kHalf);
    before = sent();
    x = block(block(x, up, down), up2, down2);
    EXPECT_EQ(PartTensor::of(x)->local().size(1), kTokens / kRanks);
    EXPECT_EQ(sent() - before, 2 * 2 * kHalf);
    const at::Tensor logits = at::linear(x, head);
    EXPECT_EQ(PartTensor::of(logits)->local().sizes(), at::IntArrayRef({kBatch, kTokens, kVocab / kRanks}));
    const at::Tensor loss = squares(logits);
    before = sent();
    torch::autograd::backward({loss}, {});
    EXPECT_EQ(sent() - before, kHalf * (2 * 2 + 2));
  });
}

/// A program that reads sizes of a slice would take its tokens for all.
TEST(TensorPass, ShardedTokensAreForProgramsThatSeeWholeSizes) {
  for (const bool gives_parts : {false, true})
    run_ranks(2, [&](Rank& rank) {
      TensorParallel parallel(rank.world());
      if (gives_parts) parallel.give_parts();
      parallel.shard_tokens();
      const auto parts = parts_of({kHidden, kHidden}, {1}, 2);
      const at::Tensor down = at::ones(local_shape(parts[0]));
      parallel.add(down, parts);
      const auto product = [&] { return at::linear(at::ones({kBatch, 4, kHidden}), down); };
      if (!gives_parts) {
        EXPECT_THROW((void)product(), StateError);
        return;
      }
      EXPECT_TRUE(parallel.is_part(product()));
      EXPECT_EQ(product().size(1), 4);
    });
}

/// Three numbers for each token, in two exchanges; nothing of the vocabulary's size.
TEST(TensorPass, LogitsAreNeverGathered) {
  constexpr int kRanks = 2;
  run_ranks(kRanks, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    const auto parts = parts_of({kVocab, kHidden}, {0}, kRanks);
    const at::Tensor head = at::ones({kVocab / kRanks, kHidden}).requires_grad_();
    parallel.add(head, parts);
    const int64_t before = rank.world().counters().bytes_sent;
    const at::Tensor logits = at::linear(input(), head).view({-1, kVocab});
    const at::Tensor loss = at::cross_entropy_loss(logits, tokens().view(-1));
    torch::autograd::backward({loss}, {});
    EXPECT_EQ(rank.world().counters().bytes_sent - before, 2 * (kRanks - 1) * 3 * kBatch * kLength * 4 / kRanks);
  });
}

/// y = gain * x w^T, as a program's own operator computes it, by its own rule.
at::Tensor scaled_product(const at::Tensor& x, const at::Tensor& weight, double gain) {
  return at::matmul(x, weight.t()) * gain;
}
TORCH_LIBRARY(tensor_pass_test, library) {
  library.def("scaled_product(Tensor x, Tensor weight, float gain) -> Tensor", &scaled_product);
  library.def("unruled(Tensor x, Tensor weight, float gain) -> Tensor", &scaled_product);
}

at::Tensor call_own(const char* name, const at::Tensor& x, const at::Tensor& weight) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow(name, "")
      .typed<at::Tensor(const at::Tensor&, const at::Tensor&, double)>()
      .call(x, weight, 0.5);
}

TEST(TensorPass, OperatorsOfProgramsRunByTheirOwnRules) {
  constexpr const char* kName = "tensor_pass_test::scaled_product";
  const Program program = {
      .shapes = {{"up", {2 * kHidden, kHidden}}, {"down", {kHidden, 2 * kHidden}}, {"n", {kHidden}}},
      .cuts = {{"up", {0}}, {"down", {1}}},
      .loss = [](const Weights& w) {
        const at::Tensor x = input() * w.at("n");
        return squares(x + call_own(kName, at::gelu(call_own(kName, x, w.at("up"))), w.at("down")));
      }};
  register_partition_rule(kName, [](const PartitionCall& call) -> std::optional<PartitionAnswer> {
    const int64_t last = call.dims(0) - 1;
    if (call.cut_dim(1) == 0) return PartitionAnswer{.arguments = {{1, 0}}, .results = {last}};
    if (call.cut_dim(1) == 1) return PartitionAnswer{.arguments = {{0, last}, {1, 1}}, .results = {kSumOfRanks}};
    return {};
  });
  expect_same(program);
  register_partition_rule(kName, [](const PartitionCall&) { return std::optional<PartitionAnswer>(); });
  expect_same(program);  // gathered
}

TEST(TensorPass, WrongRulesAreNamed) {
  constexpr const char* kName = "tensor_pass_test::scaled_product";
  const auto told_by = [&](const PartitionAnswer& answer) {
    register_partition_rule(kName, [answer](const PartitionCall&) { return std::optional(answer); });
    std::string text;
    run_ranks(2, [&](Rank& rank) {
      TensorParallel parallel(rank.world());
      const at::Tensor weight = at::ones({kHidden / 2, kHidden});
      parallel.add(weight, parts_of({kHidden, kHidden}, {0}, 2));
      try {
        (void)call_own(kName, at::ones({3, kHidden}), weight);
      } catch (const StateError& error) {
        if (rank.id() == 1) text = error.what();
      }
    });
    return text;
  };
  const auto expect_told = [&](const PartitionAnswer& answer, const std::string& part) {
    const std::string text = told_by(answer);
    EXPECT_NE(text.find(str(kName, " ", part)), std::string::npos) << text;
  };
  expect_told({.arguments = {{1, 1}}, .results = {1}}, "has a rule that does not name the dim which is cut");
  expect_told({.arguments = {{1, 0}}, .results = {0}}, "gives [3, 12], which its rule does not say");
  expect_told({.arguments = {{1, 0}}, .results = {}}, "gives 1 result, which its rule does not say");
  expect_told({.arguments = {{0, 0}, {1, 0}}, .results = {1}}, "joins [3, 24], which is not cut, with a part");
  expect_told({.arguments = {{0, 5}, {1, 0}}, .results = {1}}, "has a rule that names dim 5 of [3, 24]");
  EXPECT_EQ(told_by({.arguments = {{1, 0}}, .results = {1}}), "");
  EXPECT_THROW(
      register_partition_rule("product", [](const PartitionCall&) { return std::optional<PartitionAnswer>(); }),
      ConfigError);
  EXPECT_THROW(register_partition_rule(kName, nullptr), ConfigError);
}

/// A composite that nobody has written a rule for runs on whole tensors.
TEST(TensorPass, CompositesWithoutARuleRunOnWholes) {
  expect_same({.shapes = {{"up", {2 * kHidden, kHidden}}}, .cuts = {{"up", {0}}}, .loss = [](const Weights& w) {
                 return squares(call_own("tensor_pass_test::unruled", input(), w.at("up")));
               }});
}

/// Dropout differs over slices, and agrees where ranks have the same.
TEST(TensorPass, RandomNumbers) {
  constexpr int kRanks = 2;
  std::vector<at::Tensor> wholes(kRanks), slices(kRanks);
  run_ranks(kRanks, [&](Rank& rank) {
    RankContext::of_this_thread().streams().use_own_generator(11);
    TensorParallel parallel(rank.world());
    const at::Tensor weight = at::ones({kHidden / kRanks, kHidden});
    parallel.add(weight, parts_of({kHidden, kHidden}, {0}, kRanks));
    slices[static_cast<size_t>(rank.id())] = at::dropout(at::linear(at::ones({4, kHidden}), weight), 0.5, true);
    wholes[static_cast<size_t>(rank.id())] = at::dropout(at::ones({4, kHidden}), 0.5, true);
  });
  EXPECT_TRUE(at::equal(wholes[0], wholes[1]));
  EXPECT_FALSE(at::equal(slices[0], slices[1]));
}

TEST(TensorPass, RefusesByName) {
  run_ranks(2, [&](Rank& rank) {
    TensorParallel parallel(rank.world());
    const at::Tensor weight = at::randn({4, 8}).requires_grad_();
    parallel.add(weight, parts_of({8, 8}, {0}, 2));
    const auto text_of = [](const auto& body) -> std::string {
      try {
        body();
      } catch (const Error& error) {
        return error.what();
      }
      return "";
    };
    const at::Tensor y = at::linear(at::randn({3, 8}), weight);
    EXPECT_NE(text_of([&] {
                (void)y.as_strided({3, 2}, {8, 2});
              }).find("aten::as_strided is not known"),
              std::string::npos);
    EXPECT_NE(text_of([&] { (void)(y * at::randn({3, 4})); }).find("aten::mul joins [3, 4]"), std::string::npos);
    EXPECT_NE(text_of([&] { parallel.check_loss(y); }).find("backward: the loss is a slice"), std::string::npos);
    EXPECT_NE(text_of([&] {
                parallel.add(at::zeros({5, 8}), parts_of({8, 8}, {0}, 2));
              }).find("add: [5, 8] is not"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace trireme
