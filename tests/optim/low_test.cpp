// Mode `low`: weights and states in bf16. Expected values by a loop over elements that rounds after every operator of
// torch.optim's single-tensor path; tests/python/precision_test.py compares with torch.optim itself.
#include "optim/low.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "optim/update.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

/// Some 2000 blocks of a vector and a tail, over the end of a block of update().
constexpr int64_t kLowNumel = (int64_t{1} << 15) + 32 * 11;

float rounded(float value) { return at::BFloat16(value); }

struct Element {
  float weight = 0, gradient = 0, first = 0, second = 0;
};

void expect_adam(Element& e, const OptimizerOptions& o, double step) {
  const bool decouples = o.kind == OptimizerKind::kAdamW;
  float g = e.gradient;
  if (decouples) e.weight = rounded(e.weight * static_cast<float>(1 - o.lr * o.weight_decay));
  if (!decouples && o.weight_decay != 0) g = rounded(g + rounded(static_cast<float>(o.weight_decay)) * e.weight);
  e.first = rounded(e.first + static_cast<float>(1 - o.beta1) * (g - e.first));
  e.second = rounded(e.second * static_cast<float>(o.beta2));
  e.second = rounded(e.second + static_cast<float>(1 - o.beta2) * g * g);
  float divisor = rounded(std::sqrt(e.second));
  divisor = rounded(divisor / static_cast<float>(std::sqrt(1 - std::pow(o.beta2, step))));
  divisor = rounded(divisor + static_cast<float>(o.eps));
  const auto rate = static_cast<float>(-o.lr / (1 - std::pow(o.beta1, step)));
  e.weight = rounded(e.weight + rate * e.first / divisor);
}

void expect_sgd(Element& e, const OptimizerOptions& o, double step) {
  float g = e.gradient;
  if (o.weight_decay != 0) g = rounded(g + rounded(static_cast<float>(o.weight_decay)) * e.weight);
  if (o.momentum != 0) {
    e.first = step == 1 ? g : rounded(rounded(e.first * static_cast<float>(o.momentum)) + g);
    g = o.nesterov ? rounded(g + rounded(static_cast<float>(o.momentum)) * e.first) : e.first;
  }
  e.weight = rounded(e.weight + rounded(static_cast<float>(-o.lr)) * g);
}

void expect_adagrad(Element& e, const OptimizerOptions& o, double) {
  float g = e.gradient;
  if (o.weight_decay != 0) g = rounded(g + rounded(static_cast<float>(o.weight_decay)) * e.weight);
  e.first = rounded(e.first + g * g);
  const float divisor = rounded(rounded(std::sqrt(e.first)) + static_cast<float>(o.eps));
  e.weight = rounded(e.weight - static_cast<float>(o.lr) * g / divisor);
}

struct LowCase {
  const char* name;
  OptimizerOptions options;
  void (*expect)(Element&, const OptimizerOptions&, double);
};

std::vector<LowCase> low_cases() {
  const OptimizerOptions adam{.kind = OptimizerKind::kAdam, .lr = 3e-3, .beta1 = 0.8, .beta2 = 0.95};
  OptimizerOptions l2 = adam, adamw = adam;
  l2.weight_decay = adamw.weight_decay = 0.1;
  adamw.kind = OptimizerKind::kAdamW;
  const OptimizerOptions sgd{.kind = OptimizerKind::kSgd, .lr = 0.02};
  OptimizerOptions momentum = sgd, nesterov = sgd;
  momentum.momentum = nesterov.momentum = 0.9;
  momentum.weight_decay = nesterov.weight_decay = 0.05;
  nesterov.nesterov = true;
  const OptimizerOptions adagrad{.kind = OptimizerKind::kAdagrad, .lr = 0.02, .eps = 1e-10, .weight_decay = 0.05};
  return {{"Adam", adam, expect_adam},         {"AdamWithL2", l2, expect_adam},
          {"AdamW", adamw, expect_adam},       {"Sgd", sgd, expect_sgd},
          {"Momentum", momentum, expect_sgd},  {"Nesterov", nesterov, expect_sgd},
          {"Adagrad", adagrad, expect_adagrad}};
}

at::Tensor draw_bf16(double factor) { return (at::randn({kLowNumel}) * factor).to(at::kBFloat16); }

UpdateSpan make_low_span() {
  UpdateSpan span;
  span.master = span.weights = draw_bf16(0.1);
  span.first = at::zeros({kLowNumel}, at::kBFloat16);
  span.second = at::zeros({kLowNumel}, at::kBFloat16);
  return span;
}

class Low : public ::testing::TestWithParam<LowCase> {};

TEST_P(Low, RoundsAfterEachOperator) {
  at::manual_seed(1);
  const auto& [name, options, expect] = GetParam();
  UpdateSpan span = make_low_span();
  std::vector<Element> elements(kLowNumel);
  for (int64_t i = 0; i < kLowNumel; ++i) elements[i].weight = span.weights.data_ptr<at::BFloat16>()[i];
  for (int64_t step = 1; step <= 5; ++step) {
    span.gradients = draw_bf16(0.05);
    for (int64_t i = 0; i < kLowNumel; ++i) {
      elements[i].gradient = span.gradients.data_ptr<at::BFloat16>()[i];
      expect(elements[i], options, static_cast<double>(step));
    }
    update(span, options, /*gradient_factor=*/1, step);
  }
  at::Tensor expected = at::empty({kLowNumel});
  for (int64_t i = 0; i < kLowNumel; ++i) expected[i] = elements[i].weight;
  const at::Tensor differs = expected.ne(span.weights.to(at::kFloat));
  EXPECT_EQ(differs.sum().item<int64_t>(), 0) << "first at " << differs.nonzero()[0].item<int64_t>();
}

TEST_P(Low, GivesEveryElementTheSameWhereverItsShardBegins) {
  at::manual_seed(2);
  const OptimizerOptions& options = GetParam().options;
  UpdateSpan whole = make_low_span();
  UpdateSpan parts = whole;
  for (at::Tensor* tensor : {&parts.weights, &parts.first, &parts.second}) *tensor = tensor->clone();
  parts.master = parts.weights;
  for (int64_t step = 1; step <= 5; ++step) {
    whole.gradients = draw_bf16(0.05);
    parts.gradients = whole.gradients.clone();
    update(whole, options, 0.3, step);
    for (int64_t begin = 0; begin < kLowNumel; begin += 32 * 37)
      update(parts.slice(begin, std::min(begin + 32 * 37, kLowNumel)), options, 0.3, step);
  }
  EXPECT_TRUE(at::equal(whole.weights, parts.weights));
  EXPECT_TRUE(at::equal(whole.first, parts.first));
  EXPECT_TRUE(at::equal(whole.second, parts.second));
}

TEST_P(Low, RoundsScaledGradientsOnceAndLeavesPaddingZero) {
  at::manual_seed(3);
  const OptimizerOptions& options = GetParam().options;
  UpdateSpan scaled = make_low_span();
  scaled.weights.narrow(0, 64, 32).zero_();
  UpdateSpan plain = scaled;
  for (at::Tensor* tensor : {&plain.weights, &plain.first, &plain.second}) *tensor = tensor->clone();
  plain.master = plain.weights;
  const at::Tensor gradients = draw_bf16(0.05);
  gradients.narrow(0, 64, 32).zero_();
  scaled.gradients = gradients.clone();
  plain.gradients = (gradients.to(at::kFloat) * 0.3F).to(at::kBFloat16);
  update(scaled, options, 0.3, 1);
  update(plain, options, 1, 1);
  EXPECT_TRUE(at::equal(scaled.gradients, plain.gradients))
      << scaled.gradients.ne(plain.gradients).sum().item<int64_t>();
  EXPECT_TRUE(at::equal(scaled.weights, plain.weights)) << scaled.weights.ne(plain.weights).sum().item<int64_t>();
  EXPECT_FALSE(scaled.weights.narrow(0, 64, 32).any().item<bool>());
}

INSTANTIATE_TEST_SUITE_P(Optimizers, Low, ::testing::ValuesIn(low_cases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(LowRefusal, NamesOptimizersWithoutAnUpdateIn16Bits) {
  for (const OptimizerKind kind : {OptimizerKind::kLamb, OptimizerKind::kLion, OptimizerKind::kMuon}) {
    EXPECT_NO_THROW(check_update_dtype(kind, at::kFloat));
    try {
      check_update_dtype(kind, at::kBFloat16);
      FAIL() << optimizer_name(kind);
    } catch (const ConfigError& error) {
      EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
      EXPECT_NE(std::string(error.what()).find(std::string("optimizer.type: ") + optimizer_name(kind)),
                std::string::npos);
    }
  }
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kSgd, OptimizerKind::kClient})
    EXPECT_NO_THROW(check_update_dtype(kind, at::kBFloat16));
}

}  // namespace
}  // namespace trireme
