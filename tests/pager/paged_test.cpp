// ZeRO stage 3 with the copy policy: what is gathered when, and that a missed gather cannot pass.
#include <ATen/ops/cat.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/base/error.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

constexpr int64_t kWidth = 16;
constexpr int64_t kUnitBytes = kWidth * kWidth * 4;

PagerPolicy copy_policy(int64_t live_units, int64_t prefetched_units) {
  return {.stage = 3,
          .gather = GatherPolicy::kCopy,
          .live_bytes = live_units * kUnitBytes,
          .prefetch_bytes = prefetched_units * kUnitBytes,
          .poison = true,
          .units = {.merge_below_bytes = 0}};
}

void train_step(Chain& net, Pager& pager) {
  net->forward(at::randn({3, kWidth})).square().mean().backward();
  pager.end_backward();
  sgd_step(pager, 0.1);
}

struct Delta {
  PagerCounters pager;
  int64_t calls = 0;
};
Delta difference(const Delta& after, const Delta& before) {
  return {{after.pager.gathers - before.pager.gathers, after.pager.prefetches - before.pager.prefetches,
           after.pager.releases - before.pager.releases, after.pager.reductions - before.pager.reductions},
          after.calls - before.calls};
}
Delta now(Pager& pager, Group& group) { return {pager.counters(), group.counters().calls}; }

TEST(PagedWeights, CountsOfAChainOfFourUnitsWithRoomForTwo) {
  run_ranks(2, [](Rank& rank) {
    Chain net(4, kWidth);
    Pager pager(rank.world(), named_parameters_of(*net), copy_policy(2, 2));
    // Forward uses 0 1 2 3, backward 3 2 1: the input needs no gradient.
    Delta before = now(pager, rank.world());
    train_step(net, pager);
    Delta step = difference(now(pager, rank.world()), before);
    EXPECT_EQ(step.pager.gathers, 5);  // 0 1 2 3, and 1 again
    EXPECT_EQ(step.pager.prefetches, 0);
    EXPECT_EQ(step.pager.releases, 5);  // 0 1 3 for room, 2 1 by the update
    EXPECT_EQ(step.pager.reductions, 4);
    EXPECT_EQ(step.calls,
              9);  // 5 gathers, the end of the window and of backward, the user's writes, the norm; reductions have
                   // their own group
    for (int i = 0; i < 3; ++i) {
      before = now(pager, rank.world());
      train_step(net, pager);
      step = difference(now(pager, rank.world()), before);
      EXPECT_EQ(step.pager.gathers, 5);
      EXPECT_EQ(step.pager.prefetches, 4);  // all but the first
      EXPECT_EQ(step.pager.releases, 5);
      EXPECT_EQ(step.calls, 9);
    }
    EXPECT_EQ(pager.memory().peak_live_bytes, 2 * kUnitBytes);
    EXPECT_EQ(pager.memory().live_bytes, 0);
    pager.restore();
  });
}

TEST(PagedWeights, GathersEachUnitOnceWhereThereIsRoomForAll) {
  run_ranks(2, [](Rank& rank) {
    Chain net(4, kWidth);
    Pager pager(rank.world(), named_parameters_of(*net), copy_policy(4, 2));
    for (int i = 0; i < 3; ++i) {
      const Delta before = now(pager, rank.world());
      train_step(net, pager);
      const Delta step = difference(now(pager, rank.world()), before);
      EXPECT_EQ(step.pager.gathers, 4);
      EXPECT_EQ(step.pager.prefetches, i == 0 ? 0 : 3);
    }
    EXPECT_EQ(pager.memory().peak_live_bytes, 4 * kUnitBytes);
    pager.restore();
  });
}

TEST(PagedWeights, PrefetchesNothingWithoutAllowance) {
  run_ranks(2, [](Rank& rank) {
    Chain net(4, kWidth);
    Pager pager(rank.world(), named_parameters_of(*net), copy_policy(3, 0));
    for (int i = 0; i < 3; ++i) train_step(net, pager);
    EXPECT_EQ(pager.counters().prefetches, 0);
    pager.restore();
  });
}

TEST(PagedWeights, FollowsANewOrderAfterOneStep) {
  run_ranks(2, [](Rank& rank) {
    Chain net(4, kWidth);
    Pager pager(rank.world(), named_parameters_of(*net), copy_policy(2, 2));
    const auto step_in = [&](const std::vector<int>& order) {
      const int64_t before = pager.counters().prefetches;
      at::Tensor x = at::randn({3, kWidth});
      for (const int i : order) x = net->blocks[i]->as<torch::nn::LinearImpl>()->forward(x).tanh();
      x.sum().backward();
      pager.end_backward();
      sgd_step(pager, 0.1);
      return pager.counters().prefetches - before;
    };
    step_in({0, 1, 2, 3});
    EXPECT_EQ(step_in({0, 1, 2, 3}), 4);
    EXPECT_LT(step_in({3, 1, 0, 2}), 4);
    EXPECT_EQ(step_in({3, 1, 0, 2}), 4);
    pager.restore();
  });
}

TEST(PagedWeights, NeverHoldMoreThanTheLimitInAnyOrder) {
  run_ranks(2, [](Rank& rank) {
    Chain net(6, kWidth);
    Pager pager(rank.world(), named_parameters_of(*net), copy_policy(3, 2));
    std::mt19937 random(1);  // the same order on every rank
    for (int step = 0; step < 6; ++step) {
      at::Tensor x = at::randn({3, kWidth});
      for (int i = 0; i < 12; ++i) {
        x = net->blocks[random() % 6]->as<torch::nn::LinearImpl>()->forward(x).tanh();
        EXPECT_LE(pager.memory().live_bytes, 3 * kUnitBytes);
      }
      x.sum().backward();
      pager.end_backward();
      sgd_step(pager, 0.1);
    }
    EXPECT_LE(pager.memory().peak_live_bytes, 3 * kUnitBytes);
    pager.restore();
  });
}

TEST(PagedWeights, OfOneOperatorAreAllWholeWhateverTheLimit) {
  run_ranks(2, [](Rank& rank) {
    Chain net(4, kWidth);
    Pager pager(rank.world(), named_parameters_of(*net), copy_policy(1, 2));
    const auto weights = net->parameters();
    const at::Tensor all = at::cat(weights, 0);
    EXPECT_FALSE(all.isnan().any().item<bool>());
    EXPECT_EQ(pager.memory().live_bytes, 4 * kUnitBytes);
    pager.restore();
  });
}

TEST(PagedWeights, ThatAreAskedForDirectlyStayUntilTheNextOperator) {
  run_ranks(2, [](Rank& rank) {
    manual_seed(3);
    Chain net(4, kWidth);
    const auto expected = copies_of(net->parameters());
    Pager pager(rank.world(), named_parameters_of(*net), copy_policy(1, 8));
    for (int round = 0; round < 3; ++round) {
      for (int i : {0, 2, 1, 3}) {
        const at::Tensor whole = pager.whole(i);
        EXPECT_EQ(std::memcmp(whole.data_ptr(), expected[i].data_ptr(), kUnitBytes), 0);
      }
      ClosedWindow window = pager.close_window();
      window.meet();
      for (const OwnedSlice& slice : pager.owned()) window.publish(slice.unit);
      window.open();
    }
    pager.restore();
  });
}

// Ranks that use units of one size in different orders would be given each other's weights.
TEST(PagedWeights, UsedInDifferentOrdersAreNoticedAtOnceAndNamed) {
  try {
    run_ranks(2, [](Rank& rank) {
      Chain net(4, kWidth);
      Pager pager(rank.world(), named_parameters_of(*net), copy_policy(4, 0));
      at::Tensor x = at::randn({3, kWidth});
      for (const int i : {rank.id(), 1 - rank.id()}) x = net->blocks[i]->as<torch::nn::LinearImpl>()->forward(x);
    });
    FAIL() << "not noticed";
  } catch (const CommError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDiverged);
    const std::string text = error.what();
    for (const char* part : {"of blocks.0", "of blocks.1", "zero_optimization.leaf_module"})
      EXPECT_NE(text.find(part), std::string::npos) << text;
  }
}

// A gather that is forgotten computes with NaNs: with finish_gather()'s StorageHandle::point() taken out of the second
// gather, every test here and in use_test.cpp fails.
TEST(PagedWeights, ThatAreReleasedAreNotANumberUnderPoison) {
  run_ranks(1, [](Rank& rank) {
    Chain net(2, kWidth);
    Pager pager(rank.world(), named_parameters_of(*net), copy_policy(2, 0));
    // A pointer that the pager knows nothing of.
    const auto* data = static_cast<const float*>(pager.whole(0).const_data_ptr());
    EXPECT_FALSE(std::isnan(data[0]));
    ClosedWindow window = pager.close_window();
    window.meet();
    window.publish(0);
    EXPECT_TRUE(std::isnan(data[0]));
    window.publish(1);
    window.open();
    pager.restore();
  });
}

}  // namespace
}  // namespace trireme
