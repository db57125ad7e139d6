#include "optim/stochastic_rounding.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "optim/update.h"

namespace trireme {
namespace {

constexpr int64_t kNumel = (int64_t{1} << 16) + 5;
constexpr uint64_t kParameter = 7;
constexpr float kStepOfOne = 1.0F / 128;  // between 1 and the next value of bf16

StochasticRounding whole(uint64_t parameter = kParameter) {
  return StochasticRounding({{.begin = 0, .numel = kNumel, .parameter = parameter, .first = 0}});
}

at::Tensor rounded(const StochasticRounding& rounding, const at::Tensor& values, int64_t step = 1,
                   StochasticRounding::Tensor tensor = StochasticRounding::kWeights) {
  const at::Tensor result = at::zeros_like(values, at::kBFloat16);
  rounding.round(result, values, 0, step, tensor);
  return result;
}

/// A share p of many lies within five standard deviations of it.
void expect_share(const at::Tensor& hits, double share) {
  const auto count = static_cast<double>(hits.numel());
  EXPECT_NEAR(hits.to(at::kDouble).mean().item<double>(), share, 5 * std::sqrt(share * (1 - share) / count));
}

TEST(StochasticRounding, GoesUpAsOftenAsTheDistanceSays) {
  for (const double share : {0.1, 0.5, 0.9})
    for (const double sign : {1.0, -1.0}) {
      const at::Tensor values = at::full({kNumel}, sign * (1 + share * kStepOfOne), at::kFloat);
      const at::Tensor result = rounded(whole(), values).to(at::kFloat);
      EXPECT_TRUE(result.abs().eq(1).logical_or(result.abs().eq(1 + kStepOfOne)).all().item<bool>());
      expect_share(result.abs().gt(1), share);
      // Neighbours do not know of each other.
      expect_share(result.abs().gt(1).narrow(0, 1, kNumel - 1).logical_and(result.abs().gt(1).narrow(0, 0, kNumel - 1)),
                   share * share);
    }
}

TEST(StochasticRounding, KeepsWhatBf16Has) {
  at::manual_seed(1);
  at::Tensor values = at::randn({kNumel}).to(at::kBFloat16).to(at::kFloat);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  values[0] = kInfinity;
  values[1] = -kInfinity;
  values[2] = 0.0F;
  EXPECT_TRUE(at::equal(rounded(whole(), values).to(at::kFloat), values));
  values[3] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(rounded(whole(), values)[3].item<float>()));
}

TEST(StochasticRounding, DrawsAnewForEachStepTensorAndParameter) {
  const at::Tensor values = at::full({kNumel}, 1 + kStepOfOne / 2);
  const at::Tensor first = rounded(whole(), values);
  EXPECT_TRUE(at::equal(first, rounded(whole(), values)));
  for (const at::Tensor& other : {rounded(whole(), values, 2), rounded(whole(kParameter + 1), values),
                                  rounded(whole(), values, 1, StochasticRounding::kSecond)})
    expect_share(first.eq(other), 0.5);
}

TEST(StochasticRounding, IsTheSameWhereverAShardBegins) {
  at::manual_seed(2);
  const at::Tensor values = at::randn({kNumel});
  const at::Tensor expected = rounded(whole(), values);
  for (const int64_t cut : {int64_t{1}, int64_t{32}, int64_t{1003}, int64_t{1} << 15}) {
    constexpr int64_t kPadding = 3;  // before the parameter, which is not touched
    const StochasticRounding second(
        {{.begin = kPadding, .numel = kNumel - cut, .parameter = kParameter, .first = cut}});
    const at::Tensor result = at::zeros({kPadding + kNumel - cut}, at::kBFloat16);
    const at::Tensor given = at::cat({at::ones({kPadding}), values.narrow(0, cut, kNumel - cut)});
    for (int64_t begin = 0; begin < result.numel(); begin += 4096) {
      const int64_t numel = std::min<int64_t>(4096, result.numel() - begin);
      second.round(result.narrow(0, begin, numel), given.narrow(0, begin, numel), begin, 1,
                   StochasticRounding::kWeights);
    }
    EXPECT_FALSE(result.narrow(0, 0, kPadding).any().item<bool>());
    EXPECT_TRUE(at::equal(result.narrow(0, kPadding, kNumel - cut), expected.narrow(0, cut, kNumel - cut))) << cut;
  }
}

/// Steps of a tenth of what bf16 can tell apart: to the nearest they are lost, by chance they are taken in the mean.
TEST(StochasticRounding, TakesStepsTooSmallForBf16) {
  constexpr int64_t kSteps = 50;
  constexpr double kRate = 0.1 * kStepOfOne;
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdamW, OptimizerKind::kAdam}) {
    const OptimizerOptions optimizer{.kind = kind, .lr = kRate};
    const StochasticRounding rounding = whole();
    for (const bool is_stochastic : {false, true}) {
      UpdateSpan span;
      span.master = span.weights = at::ones({kNumel}, at::kBFloat16);
      span.first = at::zeros({kNumel}, at::kBFloat16);
      span.second = at::zeros({kNumel}, at::kBFloat16);
      if (is_stochastic) span.rounding = &rounding;
      for (int64_t step = 1; step <= kSteps; ++step) {
        span.gradients = at::full({kNumel}, -1, at::kBFloat16);
        update(span, optimizer, /*gradient_factor=*/1, step);
      }
      const double moved = span.weights.to(at::kDouble).mean().item<double>() - 1;
      EXPECT_NEAR(moved, is_stochastic ? kSteps * kRate : 0, 0.02 * kSteps * kRate) << optimizer_name(kind);
    }
  }
}

/// Weights and states are each one of the two neighbours of what the update in fp32 gives.
TEST(StochasticRounding, RoundsTheUpdateInFp32) {
  at::manual_seed(3);
  const OptimizerOptions optimizer{.kind = OptimizerKind::kAdamW, .lr = 1e-2, .weight_decay = 0.1};
  const auto draw = [](double factor) { return (at::randn({kNumel}) * factor).to(at::kBFloat16); };
  UpdateSpan span;
  span.master = span.weights = draw(0.1);
  span.first = draw(0.05);
  span.second = draw(0.05).square();
  span.gradients = draw(0.05);
  UpdateSpan wide = span;
  for (at::Tensor* tensor : {&wide.master, &wide.gradients, &wide.first, &wide.second})
    *tensor = tensor->to(at::kFloat);
  wide.weights = wide.master;
  const StochasticRounding rounding = whole();
  span.rounding = &rounding;
  update(span, optimizer, /*gradient_factor=*/0.5, 3);
  update(wide, optimizer, /*gradient_factor=*/0.5, 3);
  const auto expect_neighbours = [](const at::Tensor& narrow, const at::Tensor& exact, const char* what) {
    constexpr float kNeighbour = 1.0F / 128;  // relative
    const at::Tensor apart = narrow.to(at::kFloat).sub(exact).abs();
    EXPECT_TRUE(apart.le(exact.abs() * kNeighbour).all().item<bool>()) << what;
    EXPECT_GT(apart.gt(exact.abs() * kNeighbour / 2).sum().item<int64_t>(), 0) << what;  // the nearest is within half
  };
  expect_neighbours(span.weights, wide.weights, "weights");
  expect_neighbours(span.first, wide.first, "first");
  expect_neighbours(span.second, wide.second, "second");
}

}  // namespace
}  // namespace trireme
