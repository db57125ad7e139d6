// A transformer trains on parts of its sequences as one rank trains on whole ones.
#include "trireme/sequence/sequence_parallel.h"

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/conv1d.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/index.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linalg_svdvals.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <limits>
#include <map>
#include <string>

#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"
#include "trireme/recompute/recompute.h"
#include "trireme/recompute/selective.h"
#include "trireme/recompute/tiled.h"

namespace trireme {
namespace {

constexpr int64_t kVocab = 23, kBatch = 2, kLayers = 2, kHeadSize = 4;
constexpr double kTolerance = 1e-5;

struct Shape {
  int64_t heads = 4, key_heads = 4, length = 16;
  bool is_causal = true;
};

using Weights = std::map<std::string, at::Tensor>;
using Mask = std::function<at::Tensor(const SequenceInputs&)>;

/// A decoder with learned positions; attention heads may share keys.
struct Net {
  explicit Net(const Shape& shape) : shape(shape) {
    const at::Generator generator = at::detail::createCPUGenerator(7);
    const auto add = [&](const std::string& name, at::IntArrayRef sizes) {
      weights[name] = (at::randn(sizes, generator) * 0.3).requires_grad_();
    };
    const int64_t hidden = shape.heads * kHeadSize, keys = shape.key_heads * kHeadSize;
    add("tokens", {kVocab, hidden});
    add("positions", {64, hidden});
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const std::string prefix = std::to_string(layer) + ".";
      add(prefix + "query", {hidden, hidden});
      add(prefix + "key", {keys, hidden});
      add(prefix + "value", {keys, hidden});
      add(prefix + "out", {hidden, hidden});
      add(prefix + "up", {3 * hidden, hidden});
      add(prefix + "down", {hidden, 3 * hidden});
      add(prefix + "norm", {hidden});
    }
  }

  at::Tensor heads(const at::Tensor& x, const std::string& name) const {
    return at::linear(x, weights.at(name)).unflatten(-1, {-1, kHeadSize}).transpose(1, 2);
  }

  at::Tensor layer(const at::Tensor& x, const std::string& prefix, const at::Tensor& mask) const {
    const at::Tensor normed = at::layer_norm(x, {x.size(-1)}, weights.at(prefix + "norm"));
    const at::Tensor attended = at::scaled_dot_product_attention(
        heads(normed, prefix + "query"), heads(normed, prefix + "key"), heads(normed, prefix + "value"),
        mask.defined() ? std::optional(mask) : std::nullopt, 0, shape.is_causal && !mask.defined(), std::nullopt,
        shape.heads != shape.key_heads);
    const at::Tensor y =
        x + at::linear(attended.transpose(1, 2).reshape({x.size(0), x.size(1), -1}), weights.at(prefix + "out"));
    return y + at::linear(at::gelu(at::linear(y, weights.at(prefix + "up"))), weights.at(prefix + "down"));
  }

  at::Tensor embedded(const SequenceInputs& in) const {
    return at::embedding(weights.at("tokens"), in.input_ids) + at::embedding(weights.at("positions"), in.position_ids);
  }

  at::Tensor logits(const SequenceInputs& in, const Mask& mask_of = nullptr) const {
    at::Tensor x = embedded(in);
    const at::Tensor mask = mask_of ? mask_of(in) : at::Tensor();
    for (int64_t i = 0; i < kLayers; ++i) x = layer(x, std::to_string(i) + ".", mask);
    return at::linear(x, weights.at("tokens"));
  }

  Shape shape;
  Weights weights;
};

at::Tensor loss_of(const at::Tensor& logits_BSV, const at::Tensor& labels_BS) {
  return at::cross_entropy_loss(logits_BSV.flatten(0, 1), labels_BS.flatten());
}

SequenceInputs inputs_of(const Shape& shape) {
  const at::Generator generator = at::detail::createCPUGenerator(11);
  SequenceInputs in{.input_ids = at::randint(kVocab, {kBatch, shape.length}, generator, at::kLong),
                    .labels = at::randint(kVocab, {kBatch, shape.length}, generator, at::kLong),
                    .position_ids = at::arange(shape.length, at::kLong).unsqueeze(0)};
  in.labels.narrow(1, 0, shape.length / 2 - 1).fill_(-100);  // nearly all of the first rank's
  return in;
}

using LossOf = std::function<at::Tensor(const Net&, const SequenceInputs&)>;

at::Tensor plain_loss(const Net& net, const SequenceInputs& in) { return loss_of(net.logits(in), in.labels); }

struct Result {
  double loss = 0;
  Weights gradients;
};

Result run(const Net& net, const SequenceInputs& in, const LossOf& loss_of) {
  std::vector<at::Tensor> inputs;
  for (const auto& [name, weight] : net.weights) inputs.push_back(weight);
  const at::Tensor loss = loss_of(net, in);
  const auto gradients = torch::autograd::grad({loss}, inputs, {}, {}, false, /*allow_unused=*/true);
  Result result{.loss = loss.item<double>(), .gradients = {}};
  size_t i = 0;
  for (const auto& [name, weight] : net.weights) {
    const at::Tensor& gradient = gradients[i++];
    result.gradients[name] = gradient.defined() ? gradient.contiguous() : at::zeros(weight.sizes());
  }
  return result;
}

void expect_near(const Result& got, const Result& expected) {
  EXPECT_NEAR(got.loss, expected.loss, kTolerance * std::abs(expected.loss));
  for (const auto& [name, gradient] : expected.gradients) {
    const auto difference = (got.gradients.at(name) - gradient).abs().max().item<double>();
    EXPECT_LE(difference, kTolerance * std::max(gradient.abs().max().item<double>(), 1e-3)) << name;
  }
}

/// `loss_of` on `ranks` ranks, of which each has a part of the sequence, is what it is on one.
void compare(int ranks, const Shape& shape, const LossOf& loss_of = plain_loss,
             SequenceAttention attention = SequenceAttention::kUlysses,
             const std::function<void(SequenceInputs&)>& change = nullptr, const TilePolicy& tiles = {}) {
  SequenceInputs whole = inputs_of(shape);
  if (change) change(whole);
  const Result expected = run(Net(shape), whole, loss_of);
  run_ranks(ranks, [&](Rank& rank) {
    at::set_num_threads(1);
    SequenceParallel parallel(rank.world(), attention);
    const TiledComputation scope(tiles);
    const Net net(shape);
    Result got = run(net, parallel.cut(whole), loss_of);
    for (auto& [name, gradient] : got.gradients) {
      rank.world().all_reduce(gradient).wait();
      gradient.div_(ranks);
    }
    expect_near(got, expected);
  });
}

class EveryWorld : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, EveryWorld, ::testing::Values(1, 2, 4));

TEST_P(EveryWorld, UlyssesIsOneRank) {
  for (const bool is_causal : {true, false})
    for (const int64_t length : {16, 19})
      for (const auto& [heads, key_heads] : {std::pair{4, 4}, {4, 2}, {6, 3}, {5, 5}, {6, 1}, {12, 4}})
        compare(GetParam(), {.heads = heads, .key_heads = key_heads, .length = length, .is_causal = is_causal});
}

TEST_P(EveryWorld, ARingIsOneRank) {
  for (const bool is_causal : {true, false})
    for (const int64_t length : {16, 19})
      for (const auto& [heads, key_heads] : {std::pair{4, 4}, {4, 2}, {1, 1}})
        compare(GetParam(), {.heads = heads, .key_heads = key_heads, .length = length, .is_causal = is_causal},
                plain_loss, SequenceAttention::kRing);
}

TEST_P(EveryWorld, LabelsThatAModelShiftsLoseNoToken) {
  // As in Hugging Face's models of today, which pad the labels, and of earlier ones, which drop the last logits.
  compare(GetParam(), {}, [](const Net& net, const SequenceInputs& in) {
    const at::Tensor shifted = at::pad(in.labels, {0, 1}, "constant", -100).slice(1, 1).contiguous();
    return loss_of(net.logits(in).to(at::kFloat), shifted);
  });
  compare(GetParam(), {}, [](const Net& net, const SequenceInputs& in) {
    const at::Tensor logits = net.logits(in);
    return at::cross_entropy_loss(logits.slice(1, 0, -1).reshape({-1, kVocab}), in.labels.slice(1, 1).reshape(-1));
  });
}

TEST_P(EveryWorld, PooledTokensAreOfTheWholeSequence) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> pools = {
      [](const at::Tensor& x) { return x.mean(1); }, [](const at::Tensor& x) { return x.sum(1); },
      [](const at::Tensor& x) { return x.select(1, 0); }, [](const at::Tensor& x) { return x.select(1, -1); }};
  for (const auto& pool : pools)
    compare(GetParam(), {.length = 19}, [&](const Net& net, const SequenceInputs& in) {
      const at::Tensor logits = net.logits(in);  // and back to the tokens
      return (logits - pool(logits).unsqueeze(1)).square().mean();
    });
}

TEST_P(EveryWorld, LossesSumsAndMeansAreOfAllTokens) {
  compare(GetParam(), {}, [](const Net& net, const SequenceInputs& in) {
    return at::cross_entropy_loss(net.logits(in).flatten(0, 1), in.labels.flatten(), {}, at::Reduction::Sum) / 7;
  });
  compare(GetParam(), {}, [](const Net& net, const SequenceInputs& in) {
    const at::Tensor weight = at::arange(1, kVocab + 1, at::kFloat);
    return at::cross_entropy_loss(net.logits(in).flatten(0, 1), in.labels.flatten(), weight, at::Reduction::Mean, -100,
                                  0.1);
  });
  compare(GetParam(), {.length = 19},
          [](const Net& net, const SequenceInputs& in) { return net.logits(in).square().mean(); });
  compare(GetParam(), {.length = 19},
          [](const Net& net, const SequenceInputs& in) { return net.logits(in).square().sum() / 100; });
}

SequenceInputs& pad_second(SequenceInputs& in) {
  in.attention_mask = at::ones({kBatch, in.input_ids.size(1)}, at::kLong);
  in.attention_mask[1].narrow(0, in.input_ids.size(1) - 5, 5).fill_(0);
  in.labels.masked_fill_(in.attention_mask.eq(0), -100);
  return in;
}

/// No position sees a later one.
at::Tensor causality(const at::Tensor& positions_1S) {
  return positions_1S.unsqueeze(-1).ge(positions_1S.unsqueeze(-2)).unsqueeze(1);
}

TEST_P(EveryWorld, AMaskThatAModelMakesOfThePaddingIsCompleted) {
  // Causality by positions, and padding: of this rank's queries by this rank's keys.
  const Mask causal = [](const SequenceInputs& in) {
    return causality(in.position_ids).logical_and(in.attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(1));
  };
  const Mask additive = [causal](const SequenceInputs& in) {
    const at::Tensor kept = causal(in);
    return at::zeros(kept.sizes()).masked_fill(kept.logical_not(), -1e30);
  };
  const Mask padding_alone = [](const SequenceInputs& in) {
    return in.attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(1);
  };
  for (const Mask& mask : {causal, additive, padding_alone})
    compare(
        GetParam(), {.heads = 5, .key_heads = 5},
        [mask](const Net& net, const SequenceInputs& in) { return loss_of(net.logits(in, mask), in.labels); },
        SequenceAttention::kUlysses, [](SequenceInputs& in) { pad_second(in); });
}

TEST_P(EveryWorld, PaddingCountsWhereAModelLeavesItsMaskOutOnSomeRanks) {
  // Whether all tokens count is asked of the whole mask, so ranks agree.
  for (const bool is_causal : {true, false})
    for (const bool is_left : {true, false})
      compare(
          GetParam(), {.heads = 4, .key_heads = 2, .is_causal = is_causal},
          [is_causal](const Net& net, const SequenceInputs& in) {
            if (in.attention_mask.ne(0).all().item<bool>()) return loss_of(net.logits(in), in.labels);
            return loss_of(net.logits(in,
                                      [is_causal](const SequenceInputs& part) {
                                        const at::Tensor kept = causality(part.position_ids);
                                        return (is_causal ? kept : at::ones_like(kept))
                                            .logical_and(part.attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(1));
                                      }),
                           in.labels);
          },
          SequenceAttention::kUlysses,
          [&](SequenceInputs& in) {
            pad_second(in);
            if (is_left) in.attention_mask = in.attention_mask.flip({1});
            in.labels.fill_(-100);
            in.labels.narrow(1, 6, 4).fill_(3);
          });
}

TEST_P(EveryWorld, AMaskOfCausalityAloneIsCausalAttention) {
  const Mask causal = [](const SequenceInputs& in) { return causality(in.position_ids); };
  for (const SequenceAttention attention : {SequenceAttention::kUlysses, SequenceAttention::kRing})
    compare(
        GetParam(), {},
        [causal](const Net& net, const SequenceInputs& in) { return loss_of(net.logits(in, causal), in.labels); },
        attention);
}

TEST_P(EveryWorld, AMaskOfAllTokensIsTakenAsItIs) {
  const at::Generator generator = at::detail::createCPUGenerator(3);
  const at::Tensor of_heads = at::randn({1, 4, 16, 16}, generator);
  const at::Tensor causality = at::ones({16, 16}, at::kBool).tril();
  const at::Tensor window = causality.triu(-2);
  const at::Tensor documents =
      at::arange(16).div(5, "floor").unsqueeze(0).eq(at::arange(16).div(5, "floor").unsqueeze(1));
  at::Tensor blind = causality.clone();  // queries that see no key: as of padding on the left
  blind.narrow(0, 0, 5).fill_(false);
  blind.narrow(1, 0, 5).fill_(false);
  const at::Tensor keys_alone = at::arange(16).lt(11).view({1, 1, 1, 16});
  const at::Tensor biased = of_heads.masked_fill(window.logical_not(), -std::numeric_limits<double>::infinity());
  for (const SequenceAttention attention : {SequenceAttention::kUlysses, SequenceAttention::kRing})
    for (const at::Tensor& mask : {of_heads, of_heads.slice(1, 0, 1), of_heads[0], of_heads[0][0].gt(-1), window,
                                   documents, blind, keys_alone, biased})
      compare(
          GetParam(), {},
          [mask](const Net& net, const SequenceInputs& in) {
            return loss_of(net.logits(in, [mask](const SequenceInputs&) { return mask; }), in.labels);
          },
          attention);
}

TEST_P(EveryWorld, GoesTogetherWithTilesAndRecomputation) {
  const LossOf layers_again = [](const Net& net, const SequenceInputs& in) {
    at::Tensor x = net.embedded(in);
    for (int64_t i = 0; i < kLayers; ++i)
      x = recompute([&net, i](const at::Tensor& y) { return net.layer(y, std::to_string(i) + ".", {}); }, x);
    return loss_of(at::linear(x, net.weights.at("tokens")), in.labels);
  };
  compare(GetParam(), {}, layers_again, SequenceAttention::kUlysses, nullptr, {.loss_tokens = 3, .mlp_tokens = 3});
  compare(GetParam(), {}, [&](const Net& net, const SequenceInputs& in) {
    const SelectiveRecompute scope;
    return plain_loss(net, in);
  });
  compare(GetParam(), {}, layers_again, SequenceAttention::kRing);
}

TEST(SequenceCost, AnAttentionIsFourAllToAlls) {
  for (const int ranks : {2, 4})
    run_ranks(ranks, [&](Rank& rank) {
      at::set_num_threads(1);
      const Shape shape{.heads = 8, .key_heads = 4};
      const Net net(shape);
      SequenceParallel parallel(rank.world());
      const auto in = parallel.cut(inputs_of(shape));
      const at::Tensor x = net.embedded(in);
      const CommCounters before = rank.world().counters();
      const at::Tensor y = net.layer(x, "0.", {});
      const CommCounters after = rank.world().counters();
      EXPECT_EQ(after.calls - before.calls, 4);
      // Query and result of 8 heads, key and value of 4; of each, all but this rank's own heads.
      const int64_t numel = kBatch * shape.length / ranks * kHeadSize * (2 * 8 + 2 * 4);
      EXPECT_EQ(after.bytes_sent - before.bytes_sent, numel * 4 * (ranks - 1) / ranks);
      torch::autograd::grad({y.sum()}, {x});
      EXPECT_EQ(rank.world().counters().calls - after.calls, 4 + 2);  // and the sum's, there and back
    });
}

TEST_P(EveryWorld, AttentionWrittenOutIsOfAllTokens) {
  compare(GetParam(), {}, [](const Net& net, const SequenceInputs& in) {
    const at::Tensor x = net.embedded(in);
    const at::Tensor query = net.heads(x, "0.query"), key = net.heads(x, "0.key"), value = net.heads(x, "0.value");
    const at::Tensor scores = at::matmul(query, key.transpose(-1, -2)) / 2;
    const at::Tensor later = at::ones({x.size(1), x.size(1)}, at::kBool).triu(1);
    const at::Tensor attended = at::matmul(at::softmax(scores.masked_fill(later, -1e30), -1), value);
    return loss_of(at::linear(attended.transpose(1, 2).flatten(2), net.weights.at("tokens")), in.labels);
  });
}

TEST_P(EveryWorld, OperatorsThatMixTokensAreOfAllTokens) {
  const std::vector<std::function<at::Tensor(const at::Tensor&)>> mixes = {
      [](const at::Tensor& x) { return x.cumsum(1); },
      [](const at::Tensor& x) { return x.amax(1); },
      [](const at::Tensor& x) { return at::softmax(x.transpose(1, 2), -1); },
      [](const at::Tensor& x) { return x.roll(1, 1); },
      [](const at::Tensor& x) { return x.amax(); },
      [](const at::Tensor& x) { return x.select(1, 3); },
      [](const at::Tensor& x) { return x.chunk(2, 1)[0]; },
      [](const at::Tensor& x) {
        return at::linear(x.transpose(1, 2), at::ones({3, x.size(1)}));
      },
      [](const at::Tensor& x) { return x.slice(1, 2, 9); },
      [](const at::Tensor& x) { return x.slice(1, 0, {}, 2).flip({1}); },
      [](const at::Tensor& x) { return std::get<0>(x.sort(1)); }};
  for (const auto& mix : mixes)
    compare(GetParam(), {.length = 19}, [&](const Net& net, const SequenceInputs& in) {
      return (mix(net.logits(in)) * 0.1).square().sum() + plain_loss(net, in);
    });
}

TEST_P(EveryWorld, WhatMixesTokensAndFeaturesRunsOnSamplesOrIsRefused) {
  const std::vector<LossOf> losses = {
      [](const Net& net, const SequenceInputs& in) {
        return at::conv1d(net.logits(in).transpose(1, 2), at::ones({3, kVocab, 2})).square().mean();
      },
      [](const Net& net, const SequenceInputs& in) {
        return at::layer_norm(net.logits(in), {in.input_ids.size(1), kVocab}).tanh().mean();
      }};
  for (const LossOf& loss : losses) {
    if (GetParam() <= kBatch) {
      compare(GetParam(), {.length = 19}, loss);
      continue;
    }
    run_ranks(GetParam(), [&](Rank& rank) {
      SequenceParallel parallel(rank.world());
      EXPECT_THROW(loss(Net{Shape{}}, parallel.cut(inputs_of({}))), StateError);
    });
  }
}

TEST_P(EveryWorld, PositionsThatTheModelMakesUpAreThoseOfAllTokens) {
  compare(GetParam(), {}, [](const Net& net, const SequenceInputs& in) {
    const at::Tensor positions = at::arange(in.input_ids.size(1), at::kLong).unsqueeze(0);
    const at::Tensor x =
        at::embedding(net.weights.at("tokens"), in.input_ids) + at::embedding(net.weights.at("positions"), positions);
    return loss_of(at::linear(net.layer(x, "0.", {}), net.weights.at("tokens")), in.labels);
  });
}

TEST_P(EveryWorld, TokensThatAMaskTakesAreThoseOfAllRanks) {
  compare(GetParam(), {}, [](const Net& net, const SequenceInputs& in) {
    const at::Tensor kept = in.labels.ne(-100);  // none of the first rank's, where there are four
    return at::cross_entropy_loss(at::index(net.logits(in), {kept}), at::index(in.labels, {kept}));
  });
  compare(GetParam(), {}, [](const Net& net, const SequenceInputs& in) {
    const at::Tensor logits = net.logits(in), kept = logits.select(2, 0).gt(0);  // of activations
    at::Tensor written = at::zeros(logits.sizes());
    written.index_put_({kept}, at::index(logits.tanh(), {kept}));
    return at::index(logits, {kept}).square().mean() + written.square().sum() / 50;
  });
}

TEST_P(EveryWorld, PartsThatAreWrittenIntoATensorOfTheProgramStay) {
  compare(GetParam(), {}, [](const Net& net, const SequenceInputs& in) {
    const at::Tensor logits = net.logits(in);
    at::Tensor made = at::zeros({kBatch, in.input_ids.size(1), 3});
    for (int64_t i = 0; i < 3; ++i) made.select(2, i).copy_(logits.select(2, i));
    return made.square().mean() + made.sum(1).tanh().sum();
  });
}

struct Cubed : torch::autograd::Function<Cubed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * x.square() / x.size(1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor x = context->get_saved_variables()[0];
    return {gradients[0] * x.square() * 3 / x.size(1)};
  }
};

/// Each token less the mean over tokens, whose gradient mixes tokens, too.
struct Centred : torch::autograd::Function<Centred> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x - x.mean(1, true); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] - gradients[0].mean(1, true)};
  }
};

TEST_P(EveryWorld, FunctionsOfAProgramTakeAndGiveParts) {
  compare(GetParam(), {.length = 19}, [](const Net& net, const SequenceInputs& in) {
    return Centred::apply(Cubed::apply(net.logits(in))).square().mean();
  });
}

struct Scaled : torch::autograd::Function<Scaled> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x * weight;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], (gradients[0] * saved[0]).sum(at::IntArrayRef{0, 1})};
  }
};

struct Summed : torch::autograd::Function<Summed> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->saved_data["sizes"] = x.sizes();
    return x.sum();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0].expand(context->saved_data["sizes"].toIntVector())};
  }
};

/// The sum over tokens, whose gradient is not linear in that of the result.
struct Clamped : torch::autograd::Function<Clamped> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->saved_data["sizes"] = x.sizes();
    return x.sum(1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::Tensor each = gradients[0].tanh() + gradients[0].square();
    return {each.unsqueeze(1).expand(context->saved_data["sizes"].toIntVector())};
  }
};

/// x [B, S, H] and places [S, H], one for each token.
struct Placed : torch::autograd::Function<Placed> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x, const at::Tensor& places) {
    return x + places;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], gradients[0].sum(0)};
  }
};

/// A table with a row for each token, whose gradient is written by parts.
struct Written : torch::autograd::Function<Written> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, const at::Tensor& table) {
    context->save_for_backward({x, table});
    return x * table.slice(0, 0, x.size(1));
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &table = saved[1];
    const at::Tensor of_table = at::zeros(table.sizes());
    of_table.slice(0, 0, x.size(1)).copy_((gradients[0] * x).sum(0));
    return {gradients[0] * table.slice(0, 0, x.size(1)), of_table};
  }
};

/// A block that is computed again in backward, and gives a part and a whole.
struct Again : torch::autograd::Function<Again> {
  static torch::autograd::variable_list block(const at::Tensor& x, const at::Tensor& weight) {
    const at::Tensor scaled = (x * weight).tanh();
    return {scaled, scaled.mean(1)};
  }
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                                                const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return block(x, weight);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const at::AutoGradMode enabled(true);
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& saved : context->get_saved_variables()) leaves.push_back(saved.detach().requires_grad_());
    return torch::autograd::grad(block(leaves[0], leaves[1]), leaves, gradients);
  }
};

TEST_P(EveryWorld, FunctionsOfAProgramTakeAndGiveWholesBesideParts) {
  const auto functions = {
      LossOf([](const Net& net, const SequenceInputs& in) {
        return Scaled::apply(net.embedded(in), net.weights.at("0.norm")).square().mean();
      }),
      LossOf([](const Net& net, const SequenceInputs& in) { return Summed::apply(net.logits(in)) * 2; }),
      LossOf([](const Net& net, const SequenceInputs& in) { return Summed::apply(net.logits(in)); }),
      LossOf([](const Net& net, const SequenceInputs& in) {
        return (Clamped::apply(net.logits(in)).unsqueeze(1) * net.logits(in)).mean();
      }),
      LossOf([](const Net& net, const SequenceInputs& in) {
        return (Cubed::apply(Clamped::apply(net.embedded(in))) * net.weights.at("0.norm")).mean();
      }),
      LossOf([](const Net& net, const SequenceInputs& in) {
        const at::Tensor& table = net.weights.at("0.norm");
        const at::Tensor places = at::arange(1, in.input_ids.size(1) + 1).unsqueeze(1) * table;
        return Placed::apply(net.embedded(in), places).square().mean();
      }),
      LossOf([](const Net& net, const SequenceInputs& in) {
        const at::Tensor table = at::arange(1, in.input_ids.size(1) + 1).unsqueeze(1) * net.weights.at("0.norm");
        return Written::apply(net.embedded(in), table).square().mean();
      }),
      LossOf([](const Net& net, const SequenceInputs& in) {
        const auto again = Again::apply(net.embedded(in), net.weights.at("0.norm"));
        return (again[0] * again[1].unsqueeze(1)).square().mean() + again[1].sum();
      })};
  for (const LossOf& loss_of : functions) compare(GetParam(), {.length = 19}, loss_of);
}

TEST_P(EveryWorld, GradientsThatAProgramReadsOfPartsAreThoseOfTheLoss) {
  const auto mixed = [](const at::Tensor& x) { return (x.cumsum(1) * x).square().mean(); };
  compare(GetParam(), {.length = 19}, [&](const Net& net, const SequenceInputs& in) {
    const at::Tensor x = net.embedded(in), leaf = x.detach().requires_grad_();
    const at::Tensor gradient = torch::autograd::grad({mixed(net.layer(leaf, "0.", {}))}, {leaf})[0];
    return mixed(net.layer(x + gradient, "1.", {})) + plain_loss(net, in);
  });
  compare(GetParam(), {.length = 19}, [&](const Net& net, const SequenceInputs& in) {
    const at::Tensor x = net.embedded(in);
    x.register_hook([](const at::Tensor& gradient) { return gradient.clamp(-0.001, 0.001) + gradient.square(); });
    return mixed(net.layer(x, "0.", {}));
  });
  compare(GetParam(), {.length = 19}, [&](const Net& net, const SequenceInputs& in) {
    const at::Tensor x = net.embedded(in), y = net.layer(x, "0.", {});
    y.retain_grad();
    torch::autograd::backward({mixed(y)}, {}, /*retain_graph=*/true, false, {x});
    return mixed(y) * (1 + y.grad().abs().sum().item<double>());
  });
}

TEST_P(EveryWorld, WhatIsWrittenIntoOneTokenGoesToItsRank) {
  const auto programs = {LossOf([](const Net& net, const SequenceInputs& in) {
                           const at::Tensor x = net.embedded(in) * 1;
                           x.select(1, 0).copy_(net.weights.at("0.norm").tanh());
                           x.select(1, -1).add_(x.mean(1));
                           return net.layer(x, "0.", {}).square().mean();
                         }),
                         LossOf([](const Net& net, const SequenceInputs& in) {
                           const at::Tensor x = net.embedded(in) * 1, token = x.select(1, 7);
                           token.slice(1, 0, 3).mul_(2);  // a view of the copy
                           token.add_(net.weights.at("0.norm")).fill_diagonal_(0.5);
                           return (net.layer(x, "0.", {}) * token.sum(1).view({-1, 1, 1})).square().mean();
                         }),
                         LossOf([](const Net& net, const SequenceInputs& in) {
                           at::Tensor made = at::zeros(net.embedded(in).sizes());
                           made.add_(net.embedded(in));
                           made.select(1, 5).zero_();
                           made.select(1, 6).select(0, 1).fill_(2);
                           return net.layer(made, "0.", {}).square().mean();
                         })};
  for (const LossOf& loss_of : programs) compare(GetParam(), {.length = 19}, loss_of);
}

TEST_P(EveryWorld, AMaskThatTakesNothingTakesNothingOnEveryRank) {
  compare(GetParam(), {.length = 19}, [](const Net& net, const SequenceInputs& in) {
    const at::Tensor logits = net.logits(in), none = in.input_ids.gt(kVocab);
    at::Tensor written = at::zeros(logits.sizes());
    written.index_put_({none}, at::index(logits, {none}) * 2);
    return plain_loss(net, in) + at::index(logits, {none}).sum() + logits.masked_select(none.unsqueeze(-1)).sum() +
           written.sum();
  });
}

/// The error of `body` on every rank of two, each of which has half of the tokens.
std::string refusal_of(const std::function<void(const Net&, const SequenceInputs&)>& body,
                       SequenceAttention attention = SequenceAttention::kUlysses, const Shape& shape = {}) {
  std::string message;
  run_ranks(2, [&](Rank& rank) {
    SequenceParallel parallel(rank.world(), attention);
    const auto in = parallel.cut(inputs_of(shape));
    try {
      body(Net(shape), in);
      ADD_FAILURE() << "nothing was refused";
    } catch (const StateError& error) {
      if (rank.id() == 0) message = error.what();
    }
  });
  return message;
}

TEST(SequenceRefusal, WhatNeedsAllTokensOnEveryRank) {
  const std::string message =
      refusal_of([](const Net& net, const SequenceInputs& in) { at::linalg_svdvals(net.embedded(in).select(0, 0)); });
  EXPECT_NE(message.find("is not known to sequence parallelism"), std::string::npos) << message;
  const std::string of_all =
      refusal_of([](const Net& net, const SequenceInputs& in) { at::quantile(net.embedded(in), 0.5); });
  EXPECT_NE(of_all.find("aten::quantile mixes elements of dim 1 of ["), std::string::npos) << of_all;
  // A tensor that all ranks have would be right at some features of each rank.
  EXPECT_NE(refusal_of([](const Net& net, const SequenceInputs& in) {
              at::zeros({kVocab, 16}).index_add_(0, in.input_ids.flatten(), net.embedded(in).flatten(0, 1).detach());
            }).find("index_add_"),
            std::string::npos);
}

TEST(SequenceRefusal, AGradientOfAFunctionThatIsRightInSomeRowsAlone) {
  EXPECT_NE(refusal_of([](const Net& net, const SequenceInputs& in) {
              const at::Tensor table = at::arange(in.input_ids.size(1) + 3).unsqueeze(1) * net.weights.at("0.norm");
              torch::autograd::backward({Written::apply(net.embedded(in), table).sum()});
            }).find("as the gradient of a whole tensor"),
            std::string::npos);
}

TEST(SequenceRefusal, MasksAndHeads) {
  const auto with_mask = [](const at::Tensor& mask) {
    return [mask](const Net& net, const SequenceInputs& in) {
      net.logits(in, [mask](const SequenceInputs&) { return mask; });
    };
  };
  EXPECT_NE(refusal_of(with_mask(at::zeros({16, 16}).requires_grad_()), SequenceAttention::kRing).find("gradient"),
            std::string::npos);
  EXPECT_NE(
      refusal_of(plain_loss, SequenceAttention::kUlysses, {.heads = 1, .key_heads = 1}).find("1 heads for 2 ranks"),
      std::string::npos);
}

TEST(SequenceRefusal, SequencesThatAreTooShort) {
  run_ranks(2, [](Rank& rank) {
    SequenceParallel parallel(rank.world());
    EXPECT_THROW(parallel.cut(at::zeros({3}), 0), ShapeError);
  });
}

TEST(Sequence, AnotherModelOfTheThreadIsLeftAlone) {
  run_ranks(2, [](Rank& rank) {
    SequenceParallel parallel(rank.world());
    parallel.cut(inputs_of({}));
    const Net teacher{Shape{}};
    const auto whole = inputs_of({});
    const CommCounters before = rank.world().counters();
    plain_loss(teacher, whole);
    teacher.embedded(whole).cumsum(1);
    EXPECT_EQ(rank.world().counters().calls, before.calls);
  });
}

TEST(Sequence, DropoutDiffersOverTokensOfRanksAndAgreesElsewhere) {
  std::vector<at::Tensor> of_cut(2), of_whole(2);
  run_ranks(2, [&](Rank& rank) {
    RankContext::of_this_thread().streams().use_own_generator(5);
    SequenceParallel parallel(rank.world());
    const at::Tensor part = parallel.cut(at::ones({64, 64}), 0);
    of_cut[rank.id()] = parallel.whole(at::dropout(part, 0.5, true)).chunk(2)[rank.id()];
    of_whole[rank.id()] = at::dropout(at::ones({64, 64}), 0.5, true);
  });
  EXPECT_FALSE(at::equal(of_cut[0], of_cut[1]));
  EXPECT_TRUE(at::equal(of_whole[0], of_whole[1]));
}

TEST(Sequence, QueriesAloneAttendToWholeKeys) {
  const at::Tensor queries = at::randn({1, 2, 8, 4}), keys = at::randn({1, 2, 5, 4});
  const at::Tensor expected = at::scaled_dot_product_attention(queries, keys, keys);
  std::vector<at::Tensor> got(2);
  run_ranks(2, [&](Rank& rank) {
    SequenceParallel parallel(rank.world());
    got[rank.id()] = parallel.whole(at::scaled_dot_product_attention(parallel.cut(queries, 2), keys, keys));
  });
  for (const at::Tensor& all : got) EXPECT_TRUE(at::allclose(all, expected, 1e-5, 1e-6));
}

}  // namespace
}  // namespace trireme
