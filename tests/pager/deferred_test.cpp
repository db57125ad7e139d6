// Gradients that stay on their rank until a reduction is wanted, under every sharding.
#include <ATen/ops/randn.h>
#include <gtest/gtest.h>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int kMicroBatches = 4;
constexpr int64_t kParameters = 3 * 8 * 8;  // of chain()

Chain chain() {
  manual_seed(3);
  return Chain(3);
}

class EveryDeferral : public ::testing::TestWithParam<ZeroStage> {
 protected:
  const PagerPolicy& policy() const { return GetParam().policy; }
  bool defers() const { return policy().stage >= 2; }
};
INSTANTIATE_TEST_SUITE_P(Pager, EveryDeferral, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

// DDP's order: each rank sums its own gradients, then ranks are summed. So the sums are the plain program's, bit by
// bit.
TEST_P(EveryDeferral, TrainsLikeOneProcess) {
  at::set_num_threads(1);
  const Program<Chain> plain{.make = [] { return Chain(3); },
                             .run =
                                 [](Chain& net, const Turn&) {
                                   for (int micro = 0; micro < kMicroBatches; ++micro) loss_of(net).backward();
                                 }};
  for (const int ranks : {1, 2, 3}) {
    std::vector<at::Tensor> expected;
    run_ranks(1, [&](Rank&) { expected = plain_weights(plain, ranks); });
    run_ranks(ranks, [&](Rank& rank) {
      Chain net = chain();
      Pager pager(rank.world(), named_parameters_of(*net), policy());
      for (int step = 0; step < plain.steps; ++step) {
        manual_seed(100 * step + rank.id());
        for (int micro = 0; micro < kMicroBatches; ++micro) {
          pager.defer_reductions(micro + 1 < kMicroBatches);
          loss_of(net).backward();
          pager.end_backward();
        }
        sgd_step(pager, 0.1);
      }
      pager.restore();
      const auto got = net->parameters();
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT_TRUE(at::equal(got[i], expected[i])) << "parameter " << i << " of rank " << rank.id() << " of " << ranks;
    });
  }
}

TEST_P(EveryDeferral, SendsTheBytesOfOneReductionPerWindow) {
  run_ranks(2, [&](Rank& rank) {
    Chain net = chain();
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      pager.defer_reductions(micro + 1 < kMicroBatches);
      EXPECT_EQ(pager.counters().reduced_bytes, 0);
      EXPECT_EQ(pager.memory().deferred_bytes, defers() && micro > 0 ? 4 * kParameters : 0);
      loss_of(net).backward();
      pager.end_backward();
    }
    EXPECT_EQ(pager.memory().deferred_bytes, 0);
    sgd_step(pager, 0.1);
    EXPECT_EQ(pager.counters().reduced_bytes, 4 * kParameters);
    if (!defers()) return;
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      loss_of(net).backward();
      pager.end_backward();
    }
    sgd_step(pager, 0.1);
    EXPECT_EQ(pager.counters().reduced_bytes, (1 + kMicroBatches) * 4 * kParameters);
  });
}

TEST_P(EveryDeferral, EndsWithTheWindowAtTheLatest) {
  run_ranks(2, [&](Rank& rank) {
    Chain net = chain();
    const at::Tensor before = net->parameters()[0].detach().clone();
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    pager.defer_reductions(true);
    (net->parameters()[0].sum() * (rank.id() + 1)).backward();
    pager.end_backward();
    net->parameters()[0].sum().backward();
    pager.defer_reductions(false);
    const EndedWindow window = sgd_step(pager, 1);
    EXPECT_EQ(window.touched, (std::vector<bool>{true, false, false}));
    EXPECT_EQ(pager.counters().reduced_bytes,
              (policy().stage < 3 || policy().gather == GatherPolicy::kCopy ? 3 : 1) * 256);
    pager.restore();
    EXPECT_TRUE(at::allclose(net->parameters()[0], before - 2.5)) << net->parameters()[0];
  });
}

// A gradient that only a deferred pass reached goes along with the reduction of a later one.
TEST_P(EveryDeferral, LosesNoGradientThatTheLastPassHasNone) {
  run_ranks(2, [&](Rank& rank) {
    Chain net = chain();
    const auto before = copies_of(net->parameters());
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    pager.defer_reductions(true);
    for (const at::Tensor& parameter : net->parameters()) parameter.sum().backward();
    pager.defer_reductions(false);
    (3 * net->parameters()[1].sum()).backward();
    pager.end_backward();
    EXPECT_EQ(pager.memory().deferred_bytes, 0);
    sgd_step(pager, 1);
    EXPECT_EQ(pager.counters().reduced_bytes, 4 * kParameters);
    pager.restore();
    for (int i = 0; i < 3; ++i)
      EXPECT_TRUE(at::allclose(net->parameters()[i], before[i] - (i == 1 ? 4 : 1))) << "parameter " << i;
  });
}

TEST_P(EveryDeferral, SumsSixteenBitGradientsInFp32) {
  run_ranks(2, [&](Rank& rank) {
    Chain net = chain();
    net->to(at::kBFloat16);
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    pager.defer_reductions(true);
    for (int micro = 0; micro < 512; ++micro) {  // a bf16 sum of ones stays at 256
      net->parameters()[0].sum().backward();
      pager.end_backward();
    }
    pager.defer_reductions(false);
    const EndedWindow window = sgd_step(pager, 0);
    EXPECT_EQ(sum_over(rank.world(), window.squares), 64.0 * 512 * 512);
  });
}

}  // namespace
}  // namespace trireme
