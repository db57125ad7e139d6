#include "trireme/recompute/selective.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/exp.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/rsqrt.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/tanh.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "recompute/save_hooks.h"
#include "tests/recompute/gradients.h"
#include "tests/support/count_of.h"
#include "tests/support/counting_storage.h"
#include "tests/support/draw_by_seeds.h"
#include "tests/support/draw_from_slice.h"
#include "tests/support/live_bytes.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int64_t kRows = 32, kWidth = 64, kWide = 128;
constexpr int64_t kNarrowBytes = kRows * kWidth * 4, kWideBytes = kRows * kWide * 4;
constexpr int64_t kRowBytes = kRows * 4;  // one number per row: what a norm divides by

class Selective : public ::testing::Test {
 protected:
  using Net = std::function<at::Tensor(const at::Tensor&)>;

  Gradients gradients(const at::Tensor& loss) {
    return torch::autograd::grad({loss}, {x, up, gate, down, norm}, {}, {}, false, true);
  }

  /// Gradients of `net` with and without selective recomputation, compared; what the scope counted.
  SelectiveCounters compare(const Net& net, const SelectivePolicy& policy = {}) {
    const auto defined = [](Gradients all) {
      for (at::Tensor& one : all)
        if (!one.defined()) one = at::ones({1});
      return all;
    };
    manual_seed(3);
    const auto expected = defined(gradients(net(x).square().sum()));
    manual_seed(3);
    const SelectiveRecompute scope(policy);
    expect_equal(defined(gradients(net(x).square().sum())), expected);
    return scope.counters();
  }

  at::Tensor gated(const at::Tensor& t) const {
    return at::linear(at::silu(at::linear(t, gate)) * at::linear(t, up), down);
  }

  at::Tensor x = at::randn({kRows, kWidth}).requires_grad_();
  at::Tensor up = at::randn({kWide, kWidth}).requires_grad_();
  at::Tensor gate = at::randn({kWide, kWidth}).requires_grad_();
  at::Tensor down = at::randn({kWidth, kWide}).requires_grad_();
  at::Tensor norm = at::randn({kWidth}).requires_grad_();
};

TEST_F(Selective, RecomputesWhatStandsBetweenProducts) {
  const auto counters = compare([&](const at::Tensor& t) { return gated(t); });
  // Kept: both products' results, and the last one's, which square() saves. Dropped: silu and the product of the two.
  EXPECT_EQ(counters.kept_bytes, 2 * kWideBytes + kNarrowBytes);
  EXPECT_EQ(counters.dropped_bytes, 2 * kWideBytes);
  EXPECT_EQ(counters.recomputed, 2);
}

TEST_F(Selective, MemoryIsFreedInForward) {
  const auto held = [&] {
    const LiveBytes live;
    const auto loss = gated(x).sum();
    return live.bytes();
  };
  const int64_t plain = held();
  const SelectiveRecompute scope;
  EXPECT_NEAR(held(), plain - 2 * kWideBytes, 1024);
}

TEST_F(Selective, KeepsProductsAndAttention) {
  const auto attend = [&](const at::Tensor& t) {
    const auto heads = at::tanh(t).view({1, 4, kRows, kWidth / 4});
    return at::scaled_dot_product_attention(heads, heads * 2, heads * 3).flatten() *
           at::linear(at::tanh(t), norm).sum();
  };
  const SelectiveRecompute scope;
  CountOf attention("aten::scaled_dot_product_attention"), products("aten::linear");
  gradients(attend(x).sum());
  EXPECT_EQ(attention.count, 1);
  EXPECT_EQ(products.count, 1);
}

TEST_F(Selective, WhatAnOperatorSavesInsideIsRecomputedWithIt) {
  const auto counters = compare([&](const at::Tensor& t) {
    const auto h = at::linear(at::silu(at::linear(t, gate)), down);
    return at::linear(at::rms_norm(h, {kWidth}, norm, 1e-6), up);
  });
  EXPECT_GT(counters.dropped_bytes, kWideBytes + kNarrowBytes);
}

TEST_F(Selective, AReductionIsNotRunAgainForTheLittleThatItGives) {
  const SelectiveRecompute scope;
  const auto h = at::linear(at::linear(x, gate), down);
  CountOf means("aten::mean"), products("aten::mul");
  const auto y = at::linear(at::rms_norm(h, {kWidth}, norm, 1e-6), up).sum();
  EXPECT_EQ(products.count, 2);  // the norm's own: seen inside of it
  torch::autograd::grad({y}, {up});
  EXPECT_EQ(products.count, 4);
  EXPECT_EQ(means.count, 1);
}

TEST_F(Selective, WhatACompositeMadeForItselfIsFreed) {
  const auto h = at::linear(x, gate).to(at::kBFloat16).detach().requires_grad_();
  const auto scale = at::ones({kWide}, at::kBFloat16).requires_grad_();
  const auto weight = down.to(at::kBFloat16).detach().requires_grad_();
  const SelectiveRecompute scope;
  const LiveBytes live;
  const auto y = at::linear(at::rms_norm(h, {kWide}, scale, 1e-6), weight);  // the norm computes in fp32
  EXPECT_LE(live.bytes(), kNarrowBytes / 2 + kRowBytes + 1024);
}

TEST_F(Selective, ABatchNormRunsOnce) {
  const auto means = at::zeros({kWide}), variances = at::ones({kWide});
  const auto net = [&](const at::Tensor& t) {
    const auto h = at::linear(t, gate);
    return at::linear(at::relu(at::batch_norm(h, {}, {}, means, variances, true, 0.1, 1e-5, false)), down);
  };
  gradients(net(x).sum());
  const auto means_of_one = means.clone(), variances_of_one = variances.clone();
  means.zero_();
  variances.fill_(1);
  const SelectiveRecompute scope;
  gradients(net(x).sum());
  EXPECT_TRUE(at::equal(means, means_of_one));
  EXPECT_TRUE(at::equal(variances, variances_of_one));
}

TEST_F(Selective, SparseArgumentsAreLeftAlone) {
  const auto sparse = at::ones({kRows, kWide}).to_sparse();
  compare([&](const at::Tensor& t) { return at::linear(at::silu(at::linear(t, gate) + sparse), down); });
}

TEST_F(Selective, AResultThatItsOperatorSavesIsRecomputed) {
  const auto counters = compare([&](const at::Tensor& t) {
    const auto h = at::linear(t, gate);
    return at::linear(h * at::softmax(h, -1, at::kDouble).to(at::kFloat), down);
  });
  // The softmax in double, its rounded copy, and what the product gives start from h.
  EXPECT_EQ(counters.kept_bytes, kWideBytes + kNarrowBytes);
  EXPECT_EQ(counters.dropped_bytes, 4 * kWideBytes);
}

TEST_F(Selective, ANormSpelledOutIsRecomputedFromItsInput) {
  const auto counters = compare([&](const at::Tensor& t) {
    const auto h = at::linear(at::tanh(at::linear(t, gate)), down);
    const auto h64 = h.to(at::kDouble);
    const auto scale = at::rsqrt(h64.square().mean(-1, true) + 1e-6);
    return at::linear(norm * (h64 * scale).to(at::kFloat), up);
  });
  // h and the result of each wide product; tanh's own output starts from its input, which is as large: kept. So is
  // `scale`, in double.
  EXPECT_EQ(counters.kept_bytes, kNarrowBytes + 2 * kWideBytes + 2 * kRowBytes);
}

TEST_F(Selective, AResidualStreamIsKept) {
  const auto counters = compare([&](at::Tensor t) {
    for (int i = 0; i < 6; ++i) t = t + gated(at::rms_norm(t, {kWidth}, norm, 1e-6));
    return t;
  });
  // Five sums between layers (x is a leaf), the last one for square(); per layer two products and what it divides by.
  EXPECT_EQ(counters.kept_bytes, 6 * kNarrowBytes + 12 * kWideBytes + 6 * kRowBytes);
  // Per layer the norm's two products, silu and the product with it.
  EXPECT_EQ(counters.recomputed, 6 * 4);
}

TEST_F(Selective, DropoutIsTheSameWhenItRunsAgain) {
  compare([&](const at::Tensor& t) {
    const auto h = at::silu(at::linear(t, gate));
    return at::linear(at::dropout(h, 0.5, true) * at::dropout(h * h, 0.25, true), down);
  });
}

TEST_F(Selective, DropoutThatRunsAgainDrawsFromItsStream) {
  const testing::DrawFromSlice slices;
  for (int call = 0; call < 2; ++call) {  // in the first one the stream begins
    const auto counters = compare([&](const at::Tensor& t) {
      const auto h = at::linear(t, gate);
      const auto activated = at::silu(h);  // holds h, from which the mask is drawn again
      return at::linear(activated * at::dropout(h, 0.5, true), down);
    });
    EXPECT_GT(counters.recomputed, 0);
  }
}

TEST_F(Selective, DropoutThatRunsAgainDrawsByItsSeed) {
  const auto counters = compare([&](const at::Tensor& t) {
    const testing::DrawBySeeds seeds(7);  // over before backward
    const auto h = at::linear(t, gate);
    const auto activated = at::silu(h);
    return at::linear(activated * at::dropout(h, 0.5, true), down);
  });
  EXPECT_GT(counters.recomputed, 0);
}

TEST_F(Selective, AnOperatorThatRunsAgainIsNotSeenByTheEarlierPasses) {
  const SelectiveRecompute scope;
  const CountOf earlier("aten::silu", PassOrder::kTensor), later("aten::silu");
  gradients(gated(x).sum());
  EXPECT_EQ(earlier.count, 1);
  EXPECT_EQ(later.count, 2);
}

/// Autograd saves neither `tensor` nor a view of it, so this is no error without recomputation.
void overwrite(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  tensor.detach().fill_(7);
}

TEST_F(Selective, AWriteDoesNotReachARecipeThatIsNeeded) {
  compare([&](const at::Tensor& t) {
    const auto h = at::linear(t, gate);
    const auto wide = h.to(at::kDouble);
    const auto y = wide * wide;  // saves `wide`, which starts from h
    overwrite(h);
    return at::linear(y.to(at::kFloat), down);
  });
}

TEST_F(Selective, AWriteToAReleasedParameterDoesNotReachARecipe) {
  const auto owner = CountingStorage::manage(norm);
  const InterceptScope touches(InterceptScope::Watch::kAll);
  compare([&](const at::Tensor& t) {
    norm.detach().fill_(3);  // also after the first run's 7
    const auto y = at::linear(at::linear(t, gate), down).to(at::kDouble) * norm.to(at::kDouble);
    const at::NoGradGuard no_grad;
    owner->release(*norm.storage().unsafeGetStorageImpl());
    norm.fill_(7);
    const at::AutoGradMode grad(true);
    return y.to(at::kFloat);
  });
}

TEST_F(Selective, AWriteEndsARecipeThatNobodyNeedsYet) {
  compare([&](const at::Tensor& t) {
    const auto h = at::linear(t, gate);
    const auto wide = h.to(at::kDouble);
    overwrite(h);
    return at::linear((wide * wide).to(at::kFloat), down);
  });
}

TEST_F(Selective, InPlaceOperatorsKeepWhatTheyWrite) {
  compare([&](const at::Tensor& t) {
    auto h = at::silu(at::linear(t, gate));
    h.mul_(2);
    auto k = at::tanh(at::linear(t, up));
    k = k * 1.5;
    k.add_(h);
    return at::linear(k * h, down);
  });
}

TEST_F(Selective, ListsOfTensorsAreArgumentsToo) {
  const auto counters = compare([&](const at::Tensor& t) {
    const auto h = at::linear(t, gate);
    const auto halves = h.chunk(2, -1);
    return at::linear(at::cat({at::silu(halves[0]) * halves[1], at::silu(halves[1]) * halves[0]}, -1), down);
  });
  EXPECT_GT(counters.dropped_bytes, kWideBytes);
}

TEST_F(Selective, SeveralBackwardPassesRecomputeEachTime) {
  const SelectiveRecompute scope;
  const auto loss = gated(x).sum();
  const auto first = torch::autograd::grad({loss}, {x, gate, down}, {}, /*retain_graph=*/true);
  const auto second = torch::autograd::grad({loss}, {x, gate, down});
  expect_equal(second, first);
  EXPECT_EQ(scope.counters().recomputed, 4);
}

TEST_F(Selective, GradientsOfGradientsAreTheSame) {
  const auto penalty = [&] {
    const auto slope = torch::autograd::grad({gated(x).square().sum()}, {x}, {}, true, /*create_graph=*/true)[0];
    return torch::autograd::grad({slope.square().sum()}, {x, gate, up, down});
  };
  const auto expected = penalty();
  const SelectiveRecompute scope;
  expect_equal(penalty(), expected);
}

TEST_F(Selective, GraphsOutliveTheScope) {
  const auto expected = gradients(gated(x).sum());
  at::Tensor loss;
  {
    const SelectiveRecompute scope;
    loss = gated(x).sum();
  }
  const auto got = gradients(loss);
  for (const size_t i : {0, 1, 2, 3}) EXPECT_TRUE(at::equal(got[i], expected[i]));
}

TEST_F(Selective, ScopesEndInAnyOrder) {  // as those of two engines do
  auto first = std::make_unique<SelectiveRecompute>();
  auto second = std::make_unique<SelectiveRecompute>();
  first.reset();
  EXPECT_EQ(gradients(gated(x).sum()).size(), 5);
  EXPECT_GT(second->counters().dropped_bytes, 0);  // it still decides
  second.reset();
  EXPECT_EQ(detail::SaveScope::hooks(), nullptr);  // and nobody decides now
}

class SelectiveOfOneModel : public Selective {
 protected:
  /// For the model that `up`, `gate` and `down` belong to.
  SelectiveRecompute::IsParameter is_own() {
    return [this](const at::Tensor& tensor) {
      for (const at::Tensor& own : {up, gate, down})
        if (tensor.storage().is_alias_of(own.storage())) return true;
      return false;
    };
  }
  /// Another model.
  at::Tensor other(const at::Tensor& t) const { return at::linear(at::silu(at::linear(t, other_up)), other_down); }
  /// Operators of one name that forward and backward of `net` run.
  int64_t count(const std::string& name, const Net& net) {
    const CountOf counted(name);
    const at::Tensor loss = net(x).sum();
    torch::autograd::grad({loss}, {x});
    return counted.count;
  }

  at::Tensor other_up = at::randn({kWide, kWidth}).requires_grad_();
  at::Tensor other_down = at::randn({kWidth, kWide}).requires_grad_();
};

TEST_F(SelectiveOfOneModel, OtherModelsSavesAreNotTouched) {
  const SelectiveRecompute scope({}, is_own());
  EXPECT_EQ(count("aten::silu", [&](const at::Tensor& t) { return other(t); }), 1);
  EXPECT_EQ(scope.counters().kept_bytes, 0);
  EXPECT_EQ(scope.counters().dropped_bytes, 0);
  EXPECT_EQ(count("aten::silu", [&](const at::Tensor& t) { return gated(t); }), 2);
}

TEST_F(SelectiveOfOneModel, OtherModelsMemoryIsThatWithout) {
  const auto held = [&](const Net& net) {
    const LiveBytes live;
    const auto loss = net(x).sum();
    return live.bytes();
  };
  const Net others = [&](const at::Tensor&t) { return other(t); }, own = [&](const at::Tensor&t) { return gated(t); };
  const int64_t plain_other = held(others), plain_own = held(own);
  const SelectiveRecompute scope({}, is_own());
  EXPECT_EQ(held(others), plain_other);
  EXPECT_NEAR(held(own), plain_own - 2 * kWideBytes, 1024);
}

TEST_F(SelectiveOfOneModel, WhatIsComputedFromItsResultsIsItsOwn) {
  const Net net = [&](const at::Tensor& t) {
    const auto h = at::linear(t, gate).view({kRows, 2, -1});
    return at::silu(h) * h;
  };
  EXPECT_EQ(count("aten::silu", net), 1);
  const SelectiveRecompute scope({}, is_own());
  EXPECT_EQ(count("aten::silu", net), 2);
}

TEST_F(SelectiveOfOneModel, GradientsOfBothModelsAreThoseWithout) {
  const Net net = [&](const at::Tensor& t) { return other(gated(t)) + gated(other(t)); };
  const auto all = [&] {
    return torch::autograd::grad({net(x).square().sum()}, {x, up, gate, down, other_up, other_down});
  };
  const auto expected = all();
  const SelectiveRecompute scope({}, is_own());
  expect_equal(all(), expected);
  EXPECT_GT(scope.counters().recomputed, 0);
}

TEST_F(SelectiveOfOneModel, TwoScopesActOnTheirOwnModels) {
  const SelectiveRecompute first({}, is_own());
  const SelectiveRecompute second({.keep = {"silu"}, .extra_compute = 0}, [this](const at::Tensor& tensor) {
    return tensor.storage().is_alias_of(other_up.storage()) || tensor.storage().is_alias_of(other_down.storage());
  });
  EXPECT_EQ(count("aten::silu", [&](const at::Tensor& t) { return gated(t); }), 2);
  EXPECT_EQ(second.counters().kept_bytes, 0);
  const auto counters = first.counters();
  EXPECT_EQ(count("aten::silu", [&](const at::Tensor& t) { return other(t); }), 1);
  EXPECT_EQ(first.counters().kept_bytes, counters.kept_bytes);
  EXPECT_GT(second.counters().kept_bytes, 0);
}

TEST_F(SelectiveOfOneModel, AScopeForTheThreadActsOnTheOthers) {
  const SelectiveRecompute thread;
  const SelectiveRecompute scope({.keep = {"silu"}, .extra_compute = 0}, is_own());
  EXPECT_EQ(count("aten::silu", [&](const at::Tensor& t) { return other(t); }), 2);
  EXPECT_EQ(count("aten::silu", [&](const at::Tensor& t) { return gated(t); }), 1);
}

TEST_F(SelectiveOfOneModel, InputsOfRecomputeAreDroppedWhereTheyAreItsOwn) {
  const auto held = [&](const Net& net) {
    const at::Tensor h = net(x);
    const LiveBytes live;
    const auto y = recompute([](const at::Tensor& t) { return at::tanh(t); }, at::silu(h)).sum();
    return live.bytes();
  };
  const SelectiveRecompute scope({}, is_own());
  const int64_t own = held([&](const at::Tensor& t) { return at::linear(t, gate); });
  EXPECT_NEAR(held([&](const at::Tensor& t) { return at::linear(t, other_up); }), own + kWideBytes, 1024);
}

TEST_F(Selective, ExtraComputeRecomputesWideProductsWithinItsBudget) {
  const Net net = [&](at::Tensor t) {
    for (int i = 0; i < 8; ++i) t = t + gated(at::rms_norm(t, {kWidth}, norm, 1e-6));
    return t;
  };
  const auto kept = [&](double extra) { return compare(net, {.keep = {}, .extra_compute = extra}).kept_bytes; };
  const int64_t least = 8 * kNarrowBytes + 8 * kRowBytes, all = least + 16 * kWideBytes;
  EXPECT_EQ(kept(0), all);
  // A layer's forward is 3 products of equal cost, its step 9. A ninth pays for one of the two wide ones.
  EXPECT_NEAR(kept(1.0 / 9), all - 8 * kWideBytes, 2 * kWideBytes);
  EXPECT_EQ(kept(1.0 / 3), least);
}

TEST_F(Selective, ExtraComputeIsSpentOnFewRowsToo) {
  const Net net = [&](const at::Tensor& t) { return gated(t.narrow(0, 0, 1).tanh()); };  // weights of 32 KiB, one row
  EXPECT_LT(compare(net, {.keep = {}, .extra_compute = 1.0 / 3}).kept_bytes, compare(net).kept_bytes);
}

TEST_F(Selective, OperatorsThatThePolicyNamesAreKept) {
  const auto counters = compare([&](const at::Tensor& t) { return gated(t); }, {.keep = {"silu"}, .extra_compute = 0});
  EXPECT_EQ(counters.recomputed, 1);
  EXPECT_EQ(counters.dropped_bytes, kWideBytes);
}

TEST_F(Selective, LeavesRecomputeAlone) {
  const auto counters = compare([&](const at::Tensor& t) {
    return at::linear(recompute([this](const at::Tensor& u) { return gated(at::tanh(u)); }, t), up);
  });
  EXPECT_EQ(counters.recomputed, 0);
}

TEST_F(Selective, RefusesASavedTensorThatWasWrittenSince) {
  const SelectiveRecompute scope;
  const auto h = at::linear(x, gate);
  const auto y = at::silu(h).sum();
  {
    const at::NoGradGuard no_grad;
    h.detach().add_(1);
  }
  try {
    y.backward();
    FAIL() << "nothing was thrown";
  } catch (const RecomputeError& error) {
    EXPECT_STREQ(error.what(),
                 "selective recomputation: CPUFloatType [32, 128], saved for backward, was written since; write into a "
                 "clone() of it");
  }
}

TEST_F(Selective, RefusesABudgetBeyondForward) {
  for (const double share : {-0.1, 0.5})
    EXPECT_THROW(check(SelectivePolicy{.keep = {}, .extra_compute = share}), ConfigError);
}

}  // namespace
}  // namespace trireme
