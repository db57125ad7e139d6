#include "trireme/recompute/tiled.h"

#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/full.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/prelu.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/generated/variable_factories.h>

#include "tests/recompute/gradients.h"
#include "tests/support/count_of.h"
#include "tests/support/counting_storage.h"
#include "tests/support/live_bytes.h"
#include "trireme/intercept.h"
#include "trireme/recompute/selective.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int64_t kBatch = 2, kLength = 32, kTokens = kBatch * kLength, kHidden = 16, kInner = 48, kVocab = 40;
constexpr TilePolicy kBoth = {.loss_tokens = 24, .mlp_tokens = 24};
// Sums over tokens in another order, of gradients around 1.
constexpr double kRounding = 1e-6;

/// The largest difference, as a share of the largest value.
double distance(const at::Tensor& got, const at::Tensor& expected) {
  const auto scale = expected.abs().max().item<double>();
  return (got - expected).abs().max().item<double>() / std::max(scale, 1e-30);
}

struct Outcome {
  at::Tensor loss;
  Gradients gradients;
};

class Tiled : public ::testing::Test {
 protected:
  using Net = std::function<at::Tensor()>;

  /// The loss of `net` and the gradients of everything that it can read.
  Outcome run(const Net& net) {
    const at::Tensor loss = net();
    return {loss.detach(),
            torch::autograd::grad({loss}, {table, head, up, gate, down, more, less, bias}, {}, {}, false, true)};
  }

  void expect_near(const Outcome& got, const Outcome& expected, double tolerance = kRounding) {
    EXPECT_LE(distance(got.loss, expected.loss), tolerance);
    for (size_t i = 0; i < expected.gradients.size(); ++i) {
      ASSERT_EQ(got.gradients[i].defined(), expected.gradients[i].defined()) << "gradient " << i;
      if (!got.gradients[i].defined()) continue;
      EXPECT_LE(distance(got.gradients[i], expected.gradients[i]), tolerance) << "gradient " << i;
    }
  }

  /// `net` with tiles gives what it gives without, and nothing of `largest` elements or more is allocated.
  void compare(const Net& net, int64_t largest_numel = kTokens * kVocab, double tolerance = kRounding) {
    const Outcome expected = run(net);
    const TiledComputation scope(kBoth);
    const LargestAllocation allocations;
    expect_near(run(net), expected, tolerance);
    EXPECT_LT(allocations.bytes(), largest_numel * 4);
  }

  /// `net` with tiles is what it is without, bit by bit: somebody reads the tensors whole.
  void expect_untouched(const Net& net) {
    const Outcome expected = run(net);
    const TiledComputation scope(kBoth);
    const Outcome got = run(net);
    EXPECT_TRUE(at::equal(got.loss, expected.loss));
    for (size_t i = 0; i < expected.gradients.size(); ++i) {
      ASSERT_EQ(got.gradients[i].defined(), expected.gradients[i].defined()) << "gradient " << i;
      if (got.gradients[i].defined()) {
        EXPECT_TRUE(at::equal(got.gradients[i], expected.gradients[i])) << "gradient " << i;
      }
    }
  }

  at::Tensor embedded() const { return at::embedding(table, tokens); }
  at::Tensor gated(const at::Tensor& x) const {
    return at::linear(at::silu(at::linear(x, gate)) * at::linear(x, up), down);
  }
  at::Tensor logits() const { return at::linear(embedded(), head); }
  at::Tensor loss_of(const at::Tensor& logits_BSV) const {
    return at::cross_entropy_loss(logits_BSV.view({-1, kVocab}), targets.flatten());
  }

  /// The largest piece of memory that this thread was given.
  class LargestAllocation {
   public:
    LargestAllocation() : largest_(std::make_shared<Largest>()), guard_(c10::DebugInfoKind::PROFILER_STATE, largest_) {}
    int64_t bytes() const { return largest_->bytes; }

   private:
    struct Largest final : c10::MemoryReportingInfoBase {
      void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
        bytes = std::max(bytes, size);
      }
      bool memoryProfilingEnabled() const override { return true; }
      int64_t bytes = 0;
    };
    std::shared_ptr<Largest> largest_;
    c10::DebugInfoGuard guard_;
  };

  at::Tensor table = at::randn({kVocab, kHidden}).requires_grad_();
  at::Tensor head = at::randn({kVocab, kHidden}).requires_grad_();
  at::Tensor up = at::randn({kInner, kHidden}).requires_grad_();
  at::Tensor gate = at::randn({kInner, kHidden}).requires_grad_();
  at::Tensor down = at::randn({kHidden, kInner}).requires_grad_();
  at::Tensor more = at::randn({2 * kInner, kInner}).requires_grad_();
  at::Tensor less = at::randn({kInner, 2 * kInner}).requires_grad_();
  at::Tensor bias = at::randn({kInner}).requires_grad_();
  at::Tensor tokens = at::randint(kVocab, {kBatch, kLength}, at::kLong);
  at::Tensor targets = at::randint(kVocab, {kBatch, kLength}, at::kLong);
};

TEST_F(Tiled, AFunctionIsComputedTileByTileAndAgainInBackward) {
  const Net whole = [&] { return gated(embedded()).square().sum(); };
  const Outcome expected = run(whole);
  CountOf products("aten::linear");
  const Net tiles = [&] {
    return tiled({.tokens = 5, .dim = 1}, [this](const auto& x) { return gated(x[0]); }, {embedded()}).square().sum();
  };
  expect_near(run(tiles), expected);
  EXPECT_EQ(products.count, 2 * 3 * 7);  // 32 tokens are seven tiles; backward needs all three products
}

TEST_F(Tiled, InputsThatCannotBeCutAreRefused) {
  const auto identity = [](const std::vector<at::Tensor>& x) { return x[0]; };
  EXPECT_THROW(tiled({.tokens = 0}, identity, {tokens}), ShapeError);
  EXPECT_THROW(tiled({}, identity, {}), ShapeError);
  EXPECT_THROW(tiled({}, identity, {tokens, tokens.t()}), ShapeError);
  EXPECT_THROW(TiledComputation({.loss_tokens = -1}), ConfigError);
}

TEST_F(Tiled, EveryReductionOfTheLossIsThatOfTheLogits) {
  targets.view({-1}).slice(0, 3, 30).fill_(7);
  for (const int64_t reduction : {at::Reduction::None, at::Reduction::Mean, at::Reduction::Sum})
    for (const double smoothing : {0.0, 0.2})
      for (const bool is_weighted : {false, true}) {
        const at::Tensor weight = is_weighted ? at::rand({kVocab}) + 0.5 : at::Tensor();
        const auto reduced = [](const at::Tensor& loss) { return loss.dim() > 0 ? loss.square().sum() : loss; };
        const Net whole = [&] {
          const auto of_logits = at::linear(embedded(), head).flatten(0, 1);
          return reduced(at::cross_entropy_loss(of_logits, targets.flatten(), weight, reduction, 7, smoothing));
        };
        const Outcome expected = run(whole);
        const Net by_call = [&] {
          return reduced(tiled_cross_entropy(embedded().flatten(0, 1), head, targets.flatten(),
                                             {.tokens = 10,
                                              .class_weight = weight,
                                              .reduction = reduction,
                                              .ignore_index = 7,
                                              .label_smoothing = smoothing}));
        };
        expect_near(run(by_call), expected);
        compare(whole);
      }
}

TEST_F(Tiled, ALossOfIgnoredTokensAloneIsNan) {
  targets.fill_(-100);
  const TiledComputation scope(kBoth);
  EXPECT_TRUE(loss_of(logits()).isnan().item<bool>());
}

TEST_F(Tiled, LogitsAreNeverThere) {
  compare([&] { return loss_of(logits()); });
  // The head is the embedding; by a matrix product; in a cast, and one of what comes before the last token.
  compare([&] { return loss_of(at::linear(embedded(), table)); });
  compare([&] { return loss_of(at::matmul(embedded(), head.t())); });
  compare([&] { return loss_of(at::linear(embedded(), head).to(at::kDouble)); });
  compare([&] {
    const auto shifted = logits().slice(1, 0, kLength - 1).contiguous().view({-1, kVocab});
    return at::cross_entropy_loss(shifted, targets.slice(1, 1, kLength).reshape(-1));
  });
  compare([&] {
    const auto shifted = logits().slice(1, 0, kLength - 1).reshape({-1, kVocab});
    return at::cross_entropy_loss(shifted, targets.slice(1, 1, kLength).reshape(-1));
  });
  compare([&] { return loss_of(at::tanh(logits() / 3) * 3); });
}

TEST_F(Tiled, InnerActivationsOfAnMlpAreNeverThere) {
  const int64_t inner = kTokens * kInner;
  compare([&] { return gated(embedded()).square().sum(); }, inner);
  compare([&] { return at::linear(at::gelu(at::linear(embedded(), up, bias)), down).square().sum(); }, inner);
  compare([&] { return at::linear(at::dropout(at::linear(embedded(), up), 0.5, false), down).square().sum(); }, inner);
  compare(
      [&] {
        const auto x = embedded().view({-1, kHidden});
        return at::addmm(bias.slice(0, 0, kHidden), at::gelu(at::addmm(bias, x, up.t())), down.t()).square().sum();
      },
      inner);
  compare(
      [&] {
        const auto both = at::linear(embedded(), up).chunk(2, -1);
        return at::linear(at::silu(both[0]) * both[1], down.slice(1, 0, kInner / 2)).square().sum();
      },
      inner / 2);
}

TEST_F(Tiled, OperatorsOfOneValueForAllRowsStayInTiles) {
  const auto value = at::full({1}, 0.3), column = at::rand({kInner});
  compare([&] { return at::linear(at::linear(embedded(), up) * value, down).square().sum(); }, kTokens * kInner);
  compare([&] { return at::linear(at::linear(embedded(), up) * column, down).square().sum(); }, kTokens * kInner);
}

TEST_F(Tiled, RowsThatAreMixedOrBesideOthersAreWhole) {
  const auto x = [&] { return embedded().view({kTokens, kHidden}); };
  const auto of_rows = at::rand({kTokens, 1});
  expect_untouched([&] { return at::linear(at::linear(x(), up) * of_rows, down).square().sum(); });
  expect_untouched([&] { return at::linear(at::softmax(at::linear(x(), up), 0), down).square().sum(); });
  expect_untouched([&] { return at::linear(at::linear(x(), up).tril(), down).square().sum(); });
  const auto slopes = at::rand({kLength});  // along dim 1, which is of rows here
  expect_untouched([&] { return at::linear(at::prelu(at::linear(embedded(), up), slopes), down).square().sum(); });
}

TEST_F(Tiled, ViewsThatMayBeCopiesAreOfWhatIsThere) {
  constexpr int64_t kAnything = 1 << 30;
  compare([&] { return at::linear(embedded(), up).chunk(2, -1)[0].ravel().square().sum(); }, kAnything);
  const auto like = at::ones({kTokens, kInner / 2});
  compare([&] { return at::linear(embedded(), up).chunk(2, -1)[1].reshape_as(like).square().sum(); }, kAnything);
  expect_untouched([&] {
    const auto wide = at::linear(embedded().view({kBatch, 4, -1, kHidden}), up);
    return wide.to(at::kDouble, false, false, at::MemoryFormat::ChannelsLast).sum();
  });
}

TEST_F(Tiled, MemoryDoesNotGrowWithTheVocabulary) {
  const auto peak = [&](int64_t vocab) {
    const auto weight = at::randn({vocab, kHidden}).requires_grad_();
    const auto labels = at::randint(vocab, {4096}, at::kLong);
    const auto x = at::embedding(weight, labels);
    const TiledComputation scope({.loss_tokens = 64});
    at::embedding(weight, labels.slice(0, 0, 1));
    const LiveBytes live;
    torch::autograd::grad({at::cross_entropy_loss(at::linear(x, weight), labels)}, {weight});
    return live.peak_bytes();
  };
  // Gradients of the weight, of which there are two while tiles are summed, and of a tile the logits, what the loss
  // saves and their gradients.
  const auto more = [](int64_t vocab) { return 4 * (3 * vocab * kHidden + 4 * 64 * vocab); };
  const int64_t small = peak(100), large = peak(1000);
  EXPECT_LE(large - small, more(1000) - more(100));
  EXPECT_LT(large, 4096 * 1000 * 4 / 2);
}

TEST_F(Tiled, WhoeverReadsTheTensorsGetsThemAsWithoutTiles) {
  expect_untouched([&] { return logits().exp().sum(); });
  expect_untouched([&] { return logits().square().sum() + logits().view({kBatch, -1, 4}).exp().mean(); });
  expect_untouched([&] { return at::linear(at::linear(embedded(), up).view({kTokens, 3, -1}).sum(1), gate).sum(); });
  expect_untouched([&] {
    auto changed = logits();
    changed.select(-1, 0).fill_(0);  // in place, through a view
    return loss_of(changed);
  });
  expect_untouched([&] {
    const auto read = logits();
    const auto best = read.argmax(-1);
    return loss_of(read) + best.sum();
  });
}

TEST_F(Tiled, AnInputThatIsWrittenAfterTheProductDoesNotReachIt) {
  const TiledComputation scope(kBoth);
  auto x = embedded().detach();
  const auto expected = at::linear(x, up.detach());
  const auto wide = at::linear(x, up);
  x.add_(1);
  EXPECT_TRUE(at::equal(wide.detach(), expected));
}

TEST_F(Tiled, AGradientThatSomebodyWaitsForIsComputed) {
  const TiledComputation scope(kBoth);
  embedded();
  const auto watched = logits();
  watched.retain_grad();
  loss_of(watched).backward();
  EXPECT_EQ(watched.grad().sizes(), watched.sizes());
  const auto hooked = logits();
  int calls = 0;
  hooked.register_hook([&](const at::Tensor&) { ++calls; });
  loss_of(hooked).backward();
  EXPECT_EQ(calls, 1);
}

TEST_F(Tiled, WithoutGradientsNothingIsDeferred) {
  const TiledComputation scope(kBoth);
  const at::NoGradGuard no_grad;
  EXPECT_NO_THROW(logits().data_ptr());
}

TEST_F(Tiled, DataThatAreNotThereAreNotRead) {
  const TiledComputation scope(kBoth);
  const auto deferred = logits();
  EXPECT_THROW(deferred.data_ptr(), c10::Error);
  const auto detached = deferred.detach();
  EXPECT_NO_THROW(detached.data_ptr());
  EXPECT_TRUE(at::equal(detached, at::linear(embedded(), head).detach()));
}

TEST_F(Tiled, LogitsOfOldWeightsAreRefused) {
  const TiledComputation scope(kBoth);
  const auto kept = logits();
  {
    const at::NoGradGuard no_grad;
    head.add_(1);
  }
  EXPECT_THROW(kept.argmax(-1), StateError);
  EXPECT_THROW(loss_of(kept), StateError);
}

TEST_F(Tiled, OtherModelsOfTheThreadAreLeftAlone) {
  embedded();
  const TiledComputation scope(kBoth, [this](const at::Tensor& tensor) { return tensor.is_alias_of(up); });
  embedded();
  EXPECT_NO_THROW(logits().data_ptr());
  EXPECT_THROW(at::linear(embedded(), up).data_ptr(), c10::Error);
}

TEST_F(Tiled, AutocastIsThatOfEachOperator) {
  const Net net = [&] {
    at::Tensor wide;
    at::autocast::set_autocast_enabled(at::kCPU, true);
    wide = at::linear(gated(embedded()), head);
    at::autocast::set_autocast_enabled(at::kCPU, false);
    at::autocast::clear_cache();
    EXPECT_EQ(wide.scalar_type(), at::kBFloat16);
    return loss_of(wide.to(at::kFloat));
  };
  constexpr int64_t kAnything = 1 << 30;  // oneDNN takes more than the logits for itself
  compare(net, kAnything, 2e-2);          // sums of tiles are rounded to 16 bits
}

TEST_F(Tiled, GoesTogetherWithRecomputation) {
  const Net net = [&] {
    const auto layer = [this](const at::Tensor& x) { return x + gated(x); };
    const auto x = recompute(layer, recompute(layer, embedded() * 0.1));
    return loss_of(at::linear(x, head));
  };
  compare(net);
  const Net selective = [&] {
    const SelectiveRecompute scope;
    auto x = embedded() * 0.1;
    for (int i = 0; i < 2; ++i) x = x + gated(at::silu(x));
    return loss_of(at::linear(x, head));
  };
  compare(selective);
}

TEST_F(Tiled, AFactoryThatIsBelowAutogradMakesThemWholeWithAGraph) {
  expect_untouched([&] {
    const auto wide = at::linear(embedded(), up);
    return at::linear(wide + torch::zeros_like(wide), down).sum();
  });
}

TEST_F(Tiled, ALayerThatIsRecomputedMayGetOneAsItsInput) {
  const auto layer = [this](const at::Tensor& x) { return at::linear(at::softmax(x, -1), down); };
  expect_untouched([&] { return recompute(layer, at::linear(embedded(), up)).sum(); });
  compare(
      [&] {  // which it reads by a product, and adds to what is computed in tiles
        const auto mlp = [this](const at::Tensor& x) { return x + at::linear(at::gelu(at::linear(x, more)), less); };
        return recompute(mlp, at::linear(embedded(), up)).sum();
      },
      kTokens * 2 * kInner);
  expect_untouched([&] {  // one that came out of a layer
    const auto wide = recompute([this](const at::Tensor& x) { return at::linear(x, up); }, embedded());
    return recompute(layer, wide).sum();
  });
}

TEST_F(Tiled, WeightsAreMadeWholeForEachTile) {
  const auto owner = CountingStorage::manage(head);
  const InterceptScope watch(InterceptScope::Watch::kAll);
  const TiledComputation scope(kBoth);
  embedded();
  const auto deferred = logits();
  owner->release(*head.storage().unsafeGetStorageImpl());
  const auto loss = loss_of(deferred);
  owner->release(*head.storage().unsafeGetStorageImpl());
  torch::autograd::grad({loss}, {head});
  EXPECT_GE(owner->accesses.size(), 6u);  // three tiles, twice
}

}  // namespace
}  // namespace trireme
