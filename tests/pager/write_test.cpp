// A user's writes to parameters are applied once, on all ranks, whatever operator makes them.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/mul.h>
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

class EveryWrite : public ::testing::TestWithParam<ZeroStage> {
 protected:
  const PagerPolicy& policy() const { return GetParam().policy; }

  /// Writes, trains on, writes again between micro-batches and after the step.
  void expect_applied_once(const std::function<void(Loose&)>& write) {
    const Program<Loose> program{
        .make =
            [] {
              return Loose(std::vector<std::vector<int64_t>>{{8, 9}, {9, 8}, {50}});
            },
        .run =
            [&](Loose& net, const Turn&) {
              const auto loss = [&] {
                const at::Tensor x = at::randn({3, 8}).matmul((*net)[0]).tanh().matmul((*net)[1]);
                return x.square().mean() + (*net)[2].square().mean();
              };
              {
                at::NoGradGuard no_grad;
                write(net);
                for (int i = 0; i < 3; ++i) at::Tensor value = loss();
              }
              loss().backward();
              at::NoGradGuard no_grad;
              write(net);
            }};
    expect_trains_like_one_process(program, policy());
  }
};
INSTANTIATE_TEST_SUITE_P(Pager, EveryWrite, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

TEST_P(EveryWrite, ByAdd) {
  expect_applied_once([](Loose& net) { (*net)[0].add_(0.25); });
}
TEST_P(EveryWrite, ByZeroAndCopy) {
  expect_applied_once([](Loose& net) {
    (*net)[2].zero_();
    (*net)[0].copy_(at::arange(72).view({8, 9}).mul(0.01));
  });
}
TEST_P(EveryWrite, OfASlice) {
  expect_applied_once([](Loose& net) {
    (*net)[0].narrow(0, 3, 4).mul_(1.5);
    (*net)[2].select(0, 49).fill_(7);
    (*net)[1].t().diagonal().zero_();
  });
}
TEST_P(EveryWrite, ByATensorList) {
  expect_applied_once([](Loose& net) {
    at::_foreach_add_(net->weights, 0.25);
    at::_foreach_mul_({(*net)[0], (*net)[2]}, 0.5);
  });
}
TEST_P(EveryWrite, ToAnOutArgument) {
  expect_applied_once([](Loose& net) { at::mul_out((*net)[0], (*net)[1].t(), at::full({}, 0.5)); });
}
TEST_P(EveryWrite, OfAValueReadFromTheParameterItself) {
  expect_applied_once([](Loose& net) {
    (*net)[2].fill_((*net)[2].select(0, 3));
    (*net)[2].narrow(0, 0, 20).add_((*net)[2].narrow(0, 20, 20));
    (*net)[2].select(0, 3).add_(1);
  });
}
TEST_P(EveryWrite, ByIndex) {
  expect_applied_once([](Loose& net) {
    const c10::List<std::optional<at::Tensor>> rows({at::arange(3)});
    (*net)[0].index_put_(rows, at::full({3, 9}, 0.5));
  });
}

TEST_P(EveryWrite, OfRandomNumbersIsTheSameOnEveryRank) {
  run_ranks(3, [&](Rank& rank) {
    manual_seed(3);
    Loose net(std::vector<std::vector<int64_t>>{{100}});
    manual_seed(11);
    const at::Tensor expected = at::empty({100}).normal_();
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    {
      at::NoGradGuard no_grad;
      manual_seed(11);
      (*net)[0].normal_();
      EXPECT_TRUE(at::equal((*net)[0], expected));
    }
    ((*net)[0] * 0).sum().backward();
    pager.end_backward();
    const EndedWindow window = sgd_step(pager, 0.1);
    EXPECT_TRUE(window.written[0]);
    EXPECT_TRUE(at::equal((*net)[0], expected));
    const EndedWindow next = sgd_step(pager, 0.1);
    EXPECT_FALSE(next.written[0]);
    pager.restore();
  });
}

TEST_P(EveryWrite, OfOtherValuesThanAnotherRanksIsRefusedByNameOnEveryRank) {
  run_ranks(2, [&](Rank& rank) {
    Loose net(std::vector<std::vector<int64_t>>{{100}, {64}, {80}, {90}});
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    {
      at::NoGradGuard no_grad;
      (*net)[1].fill_(rank.id());
    }
    const std::string error = error_of([&] {
      for (int pass = 0; pass < 2; ++pass)  // the copy policy releases the written one, and would gather parts of both
        for (const at::Tensor& weight : net->weights) weight.sum().backward();
      pager.end_backward();
      sgd_step(pager, 0.1);
    });
    EXPECT_NE(error.find("has written into parameter '" + pager.parameters()[1].name + "' in place, and another rank"),
              std::string::npos)
        << error;
  });
}

TEST_P(EveryWrite, OfOneRankAloneIsRefusedByNameOnEveryRank) {
  if (policy().stage == 3 && policy().gather == GatherPolicy::kCopy) GTEST_SKIP() << "writing is collective";
  run_ranks(3, [&](Rank& rank) {
    Loose net(std::vector<std::vector<int64_t>>{{100}, {64}});
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    if (rank.id() == 1) {
      at::NoGradGuard no_grad;
      (*net)[1].mul_(2);
    }
    const std::string expected = "parameter '" + pager.parameters()[1].name + "' in place, and another rank";
    EXPECT_NE(error_of([&] { pager.settle_writes(); }).find(expected), std::string::npos);
    EXPECT_NE(error_of([&] { sgd_step(pager, 0.1); }).find(expected), std::string::npos);
    at::NoGradGuard no_grad;
    (*net)[1].fill_(2);  // alike, which mends it
    sgd_step(pager, 0.1);
    pager.restore();
    EXPECT_TRUE(at::equal((*net)[1], at::full({64}, 2.0)));
  });
}

TEST_P(EveryWrite, ThatFailsHalfWayLeavesThePagerUsable) {
  run_ranks(2, [&](Rank& rank) {
    manual_seed(3);
    Loose net(std::vector<std::vector<int64_t>>{{100}, {4, 4}});
    const auto before = copies_of(net->weights);
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    {
      at::NoGradGuard no_grad;
      EXPECT_NE(error_of([&] { (*net)[0].add_((*net)[1]); }), "");
      EXPECT_NE(error_of([&] { (*net)[1].normal_(0, -1); }), "");
    }
    EXPECT_TRUE(at::equal((*net)[0], before[0]));
    sgd_step(pager, 0.1);
    pager.restore();
    EXPECT_TRUE(at::equal((*net)[0], before[0]));
    EXPECT_TRUE(at::equal((*net)[1], before[1]));
  });
}

TEST_P(EveryWrite, AndUpdateOfAFastRankIsUnseenByASlowOneThatStillEvaluates) {
  // Under the copy policy evaluation is collective, so only where it is not can one rank be ahead.
  if (policy().stage == 3 && policy().gather == GatherPolicy::kCopy) GTEST_SKIP() << "no rank can be ahead";
  run_ranks(3, [&](Rank& rank) {
    Loose net(std::vector<std::vector<int64_t>>{{4000}});
    {
      at::NoGradGuard no_grad;
      (*net)[0].fill_(1);
    }
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    for (int step = 0; step < 5; ++step) {
      const double value = 1 - 0.125 * step;  // exact in fp32
      (*net)[0].sum().backward();
      pager.end_backward();
      if (step % 3 == rank.id()) {
        for (int look = 0; look < 20; ++look) {
          std::this_thread::sleep_for(std::chrono::milliseconds(1));
          at::NoGradGuard no_grad;
          EXPECT_EQ((*net)[0].sum().item<double>(), 4000 * value) << "step " << step;
        }
      }
      sgd_step(pager, 0.125);
    }
    pager.restore();
  });
}

}  // namespace
}  // namespace trireme
