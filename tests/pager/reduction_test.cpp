// Reductions of ranks' gradients: their mean or their sum, divided before they travel, in the dtype they travel in.
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <cmath>

#include "tests/pager/training.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int64_t kNumel = 40'000;  // more than a small gradient's bytes, in 16 bit too

/// The gradients of one window in which rank r's is `gradient` + r * `step` everywhere, in which kNumel weights are of
/// `dtype`.
struct Reduced {
  double value = 0;  ///< of every element that this rank owns
  double norm = 0;
  int64_t sent_bytes = 0;
};

struct Gradients {
  at::ScalarType dtype = at::kFloat;
  at::ScalarType communication_dtype = at::ScalarType::Undefined;
  double of_rank_0 = 0;
  double step = 0;
};

Reduced reduce(Rank& rank, const PagerPolicy& policy, const Gradients& gradients) {
  at::Tensor weight = at::ones({kNumel}, gradients.dtype).requires_grad_();
  Pager pager(rank.world(), {{"w", weight, gradients.communication_dtype}}, policy);
  weight.backward(at::full({kNumel}, gradients.of_rank_0 + rank.id() * gradients.step, gradients.dtype));
  pager.end_backward();
  ClosedWindow window = pager.close_window();
  const Reduced reduced = {pager.owned()[0].gradients[0].item<double>(),
                           std::sqrt(sum_over(rank.world(), window.squares().total())), pager.counters().reduced_bytes};
  window.begin_update();
  window.publish(0);
  window.open();
  return reduced;
}

bool reads_in_place(const PagerPolicy& policy) { return policy.stage == 3 && policy.gather == GatherPolicy::kShared; }

class Reduction : public ::testing::TestWithParam<ZeroStage> {};

TEST_P(Reduction, IsTheMeanOrTheSumOverRanks) {
  PagerPolicy policy = GetParam().policy;
  run_ranks(3, [&](Rank& rank) {
    EXPECT_EQ(reduce(rank, policy, {.of_rank_0 = 3, .step = 3}).value, 6);
    PagerPolicy sums = policy;
    sums.gradient_op = ReduceOp::kSum;
    EXPECT_EQ(reduce(rank, sums, {.of_rank_0 = 3, .step = 3}).value, 18);
    sums.predivide_factor = 2;
    EXPECT_EQ(reduce(rank, sums, {.of_rank_0 = 3, .step = 3}).value, 18);
  });
}

TEST_P(Reduction, DividesBeforehandWhatWouldLeaveTheRangeOfFp16) {
  PagerPolicy policy = GetParam().policy;
  policy.accumulation_dtype = at::kHalf;
  PagerPolicy divides = policy;
  divides.predivide_factor = 2;
  const Gradients gradients = {.dtype = at::kHalf, .of_rank_0 = 40'000};
  run_ranks(2, [&](Rank& rank) {
    EXPECT_EQ(reduce(rank, divides, gradients).value, 40'000);
    // 80000 is infinite in fp16. Where it is never rounded, nothing is lost either way.
    const Reduced whole = reduce(rank, policy, gradients);
    EXPECT_EQ(std::isfinite(whole.value), reads_in_place(policy)) << whole.value;
    EXPECT_EQ(std::isfinite(whole.norm), reads_in_place(policy));
  });
}

TEST_P(Reduction, SendsInTheDtypeThatWasAskedFor) {
  const PagerPolicy& policy = GetParam().policy;
  run_ranks(2, [&](Rank& rank) {
    for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
      // 1 + 2^-12 is fp32's alone: rounded, both ranks' are 1 and 3.
      const Reduced rounded = reduce(rank, policy, {.communication_dtype = dtype, .of_rank_0 = 1 + 0x1p-12, .step = 2});
      EXPECT_EQ(rounded.value, 2) << dtype;
      const Reduced whole = reduce(rank, policy, {.of_rank_0 = 1 + 0x1p-12, .step = 2});
      EXPECT_EQ(whole.value, 2 + 0x1p-12);
      EXPECT_EQ(rounded.sent_bytes * 2, whole.sent_bytes) << dtype;
    }
    const Reduced wider =
        reduce(rank, policy, {.dtype = at::kBFloat16, .communication_dtype = at::kFloat, .of_rank_0 = 1});
    EXPECT_EQ(wider.sent_bytes, reduce(rank, policy, {.dtype = at::kBFloat16, .of_rank_0 = 1}).sent_bytes);
  });
}

TEST_P(Reduction, OfFp16AccumulatesInFp32OrFp16) {
  run_ranks(2, [&](Rank& rank) {
    PagerPolicy policy = GetParam().policy;
    // The mean of 1 and 1 + 2^-10 lies between two numbers of fp16.
    const Gradients gradients = {.dtype = at::kHalf, .of_rank_0 = 1, .step = 0x1p-10};
    policy.accumulation_dtype = at::kFloat;
    EXPECT_EQ(reduce(rank, policy, gradients).value, 1 + 0x1p-11);
    policy.accumulation_dtype = at::kHalf;
    EXPECT_EQ(reduce(rank, policy, gradients).value, 1);
  });
}

INSTANTIATE_TEST_SUITE_P(Shardings, Reduction, ::testing::ValuesIn(kZeroStages),
                         [](const auto& info) { return info.param.name; });

TEST(ReductionErrors, NameTheKeyAndTheFix) {
  run_ranks(1, [](Rank& rank) {
    const auto refusal = [&](const PagerPolicy& policy) {
      return error_of([&] { Pager pager(rank.world(), {{"w", at::ones({4}).requires_grad_()}}, policy); });
    };
    EXPECT_EQ(refusal({.gradient_op = ReduceOp::kMax}),
              "gradient_allreduce_op: gradients are averaged or summed; use kMean or kSum");
    EXPECT_EQ(refusal({.predivide_factor = 0}),
              "gradient_predivide_factor: 0 divides no gradient; use a number above 0");
  });
}

TEST(Units, OfAnotherCommunicationDtypeAreUnitsOfTheirOwn) {
  const std::vector<ParameterSpec> parameters = {
      {"layers.0.a", {4}}, {"layers.0.b", {4}, at::kFloat, true, at::kBFloat16}, {"layers.0.c", {4}}};
  const Layout layout = make_layout(parameters, 2);
  ASSERT_EQ(layout.units.size(), 2u);
  EXPECT_EQ(layout.units[0].communication_dtype, at::ScalarType::Undefined);
  EXPECT_EQ(layout.units[1].communication_dtype, at::kBFloat16);
  EXPECT_EQ(layout.unit_of, (std::vector<int>{0, 1, 0}));
}

TEST(GradientCheck, StopsABackwardPassBeforeAGradientIsTaken) {
  run_ranks(1, [](Rank& rank) {
    at::Tensor weight = at::ones({2}).requires_grad_();
    Pager pager(rank.world(), {{"w", weight}}, {});
    bool refuses = true;
    pager.set_gradient_check([&] {
      if (refuses) throw StateError("not this one");
    });
    EXPECT_EQ(error_of([&] { weight.sum().backward(); }), "not this one");
    EXPECT_FALSE(weight.grad().defined());
    refuses = false;
    (weight * 3).sum().backward();
    pager.end_backward();
    ClosedWindow window = pager.close_window();
    EXPECT_EQ(pager.owned()[0].gradients[0].item<float>(), 3);
    window.meet();
    window.publish(0);
    window.open();
  });
}

}  // namespace
}  // namespace trireme
