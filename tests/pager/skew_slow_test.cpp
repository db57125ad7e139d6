// Ranks that sleep at random, more of them than cores, and use parameters as chance will have it: ten seconds of it.
#include <gtest/gtest.h>

#include <chrono>
#include <random>
#include <thread>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;
using Clock = std::chrono::steady_clock;

constexpr int kParameters = 7;
// Small gradients, ones with a block of their own, one that lies in a single shard.
const std::vector<std::vector<int64_t>> kShapes = {{10}, {200, 100}, {1}, {33000}, {100, 200}, {77}, {3, 3}};

/// The work of one rank in one micro-batch. Everybody can compute everybody's.
struct Plan {
  int multiples[kParameters];  ///< gradient of each element; 0: not used
  bool separately[kParameters];
};

Plan plan_of(int step, int micro, int rank) {
  std::mt19937 random(static_cast<unsigned>(step * 1000 + micro * 100 + rank));
  Plan plan;
  for (int i = 0; i < kParameters; ++i) {
    plan.multiples[i] = static_cast<int>(random() % 4);
    plan.separately[i] = random() % 4 == 0;
  }
  return plan;
}

void nap(std::mt19937& random) {
  if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
}

void run_plan(Loose& net, const Plan& plan, std::mt19937& random) {
  at::Tensor loss = at::zeros({});
  for (int i = 0; i < kParameters; ++i) {
    nap(random);
    if (plan.multiples[i] == 0) continue;
    const at::Tensor term = (*net)[i].sum() * plan.multiples[i];
    if (plan.separately[i]) {
      term.backward();
    } else {
      loss = loss + term;
    }
  }
  if (loss.requires_grad()) loss.backward();
}

void expect(const Plan& plan, std::vector<int64_t>& sums, std::vector<bool>& touched) {
  for (int i = 0; i < kParameters; ++i) {
    sums[i] += plan.multiples[i];
    if (plan.multiples[i] > 0) touched[i] = true;
  }
}

void train_randomly(Rank& rank, const PagerPolicy& policy, std::chrono::milliseconds limit) {
  Loose net(kShapes);
  {
    at::NoGradGuard no_grad;
    for (at::Tensor& weight : net->weights) weight.zero_();
  }
  Pager pager(rank.world(), named_parameters_of(*net), policy);
  std::mt19937 random(static_cast<unsigned>(rank.id()));
  std::vector<int64_t> expected(kParameters);  // of -weight * ranks
  const auto end = Clock::now() + limit;
  at::Tensor go_on = at::ones({1}, at::kByte);
  for (int step = 0; go_on.item<uint8_t>() != 0; ++step) {
    const int micros = 1 + step % 3;
    (*net)[0].sum();  // under the copy policy a unit must be used by all ranks or none
    std::vector<bool> touched(kParameters);
    for (int micro = 0; micro < micros; ++micro) {
      run_plan(net, plan_of(step, micro, rank.id()), random);
      for (int peer = 0; peer < rank.size(); ++peer) expect(plan_of(step, micro, peer), expected, touched);
      nap(random);
      pager.end_backward();
    }
    nap(random);
    const EndedWindow window = sgd_step(pager, 1);
    ASSERT_EQ(window.touched, touched) << "step " << step;
    {
      // By all ranks or none: under the copy policy it is collective.
      at::NoGradGuard no_grad;
      const int i = step % kParameters;
      ASSERT_TRUE((*net)[i].eq(static_cast<double>(-expected[i])).all().item<bool>())
          << "step " << step << ", parameter " << i;
    }
    if (rank.id() == 0) go_on.fill_(Clock::now() < end && step < 20000 ? 1 : 0);
    rank.world().broadcast(go_on, 0).wait();
  }
  pager.restore();
  for (int i = 0; i < kParameters; ++i)
    EXPECT_TRUE((*net)[i].eq(static_cast<double>(-expected[i])).all().item<bool>()) << "parameter " << i;
}

class Skew : public ::testing::TestWithParam<ZeroStage> {};
INSTANTIATE_TEST_SUITE_P(Pager, Skew, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

TEST_P(Skew, OfRanksThatUseParametersAtRandomLeavesNoGradientBehind) {
  // With the copy policy ranks must gather the same units: one unit holds all.
  PagerPolicy policy = GetParam().policy;
  policy.gradient_op = ReduceOp::kSum;  // so that everything stays an integer
  if (policy.stage == 3 && policy.gather == GatherPolicy::kCopy)
    policy.units = {.patterns = {"^blocks"}, .merge_below_bytes = 0};
  at::set_num_threads(1);
  const bool is_one_sided = policy.stage == 3 && policy.gather == GatherPolicy::kShared;
  for (const int ranks : {2, 3, 8})
    run_ranks(ranks,
              [&](Rank& rank) { train_randomly(rank, policy, std::chrono::milliseconds(is_one_sided ? 3500 : 500)); },
              {.timeout = std::chrono::seconds(20)});
}

}  // namespace
}  // namespace trireme
