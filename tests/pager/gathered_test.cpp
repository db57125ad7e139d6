// Parameters that are whole for a scope, at every stage and under both gather policies.
#include "trireme/pager/init/gathered.h"

#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/pager/init/init.h"

namespace trireme {
namespace {

using namespace testing;

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

class Gathered : public ::testing::TestWithParam<ZeroStage> {};

float* floats(const at::Tensor& tensor) { return static_cast<float*>(tensor.storage().mutable_data()); }

TEST_P(Gathered, CanBeReadThroughTheirPointers) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [](Rank& rank) {
      manual_seed(3);
      Chain net(5);
      const auto expected = copies_of(net->parameters());
      Pager pager(rank.world(), named_parameters_of(*net), GetParam().policy);
      const zero::GatheredParameters whole(net);
      for (size_t i = 0; i < expected.size(); ++i)
        EXPECT_EQ(std::memcmp(net->parameters()[i].const_data_ptr(), expected[i].const_data_ptr(), 64 * 4), 0) << i;
    });
  }
}

TEST_P(Gathered, TakeTheValuesOfTheModifyingRank) {
  run_ranks(2, [](Rank& rank) {
    manual_seed(3);
    Chain net(5);
    Pager pager(rank.world(), named_parameters_of(*net), GetParam().policy);
    const std::vector<at::Tensor> weights = net->parameters();
    {
      zero::GatheredParameters whole({weights[1], weights[3], weights[1]}, {.modifier_rank = 1});
      if (rank.id() == 1) {
        at::NoGradGuard no_grad;
        weights[1].fill_(7);
        for (int i = 0; i < 64; ++i) floats(weights[3])[i] = static_cast<float>(i);
      }
      whole.close();
    }
    EXPECT_TRUE(weights[1].eq(7).all().item<bool>());
    EXPECT_TRUE(at::equal(weights[3].view(-1), at::arange(64, at::kFloat)));
    // A step later it is what the step began with.
    sgd_step(pager, 0.1);
    pager.restore();
    EXPECT_TRUE(weights[1].eq(7).all().item<bool>());
    EXPECT_TRUE(at::equal(weights[3].view(-1), at::arange(64, at::kFloat)));
    EXPECT_FALSE(weights[0].eq(7).any().item<bool>());
  });
}

TEST_P(Gathered, RefuseAWriteThatNoRankWasNamedFor) {
  run_ranks(2, [](Rank& rank) {
    manual_seed(3);
    Chain net(3);
    const auto expected = copies_of(net->parameters());
    Pager pager(rank.world(), named_parameters_of(*net), GetParam().policy);
    {
      const zero::GatheredParameters whole(net);
      at::NoGradGuard no_grad;
      const std::string error = error_of([&] { net->parameters()[1].fill_(7); });
      EXPECT_SAYS(error,
                  "parameter 'blocks.1.weight' was written inside a GatheredParameters scope without modifier_rank");
      EXPECT_SAYS(error, "count as modifier_rank");
    }
    at::NoGradGuard no_grad;
    net->parameters()[0].fill_(7);  // after the scope as ever
    EXPECT_TRUE(at::equal(net->parameters()[1], expected[1]));
    EXPECT_TRUE(net->parameters()[0].eq(7).all().item<bool>());
  });
}

TEST_P(Gathered, OverlapWhereNobodyWritesAndAreRefusedByNameElsewhere) {
  run_ranks(2, [](Rank& rank) {
    manual_seed(3);
    Chain net(3);
    const auto expected = copies_of(net->parameters());
    Pager pager(rank.world(), named_parameters_of(*net), GetParam().policy);
    {
      const zero::GatheredParameters outer(net);
      { const zero::GatheredParameters inner({net->parameters()[0]}); }
      EXPECT_EQ(floats(net->parameters()[0])[0], expected[0].data_ptr<float>()[0]);  // still whole
      EXPECT_SAYS(error_of([&] { zero::GatheredParameters modifies(net, {.modifier_rank = 0}); }),
                  "parameter 'blocks.0.weight' is in another scope already");
      EXPECT_SAYS(error_of([&] { (void)pager.close_window(); }), "'blocks.0.weight' is in a GatheredParameters scope");
    }
    zero::GatheredParameters modifies(net, {.modifier_rank = 0});
    EXPECT_SAYS(error_of([&] { zero::GatheredParameters reads(net); }), "which may modify it");
    modifies.close();
    sgd_step(pager, 0.1);
  });
}

TEST_P(Gathered, ThatWereNotClosedAreUnusableUntilAScopeIs) {
  run_ranks(2, [](Rank& rank) {
    manual_seed(3);
    Chain net(2);
    Pager pager(rank.world(), named_parameters_of(*net), GetParam().policy);
    { zero::GatheredParameters modifies({net->parameters()[1]}, {.modifier_rank = 1}); }
    EXPECT_SAYS(error_of([&] { pager.settle_writes(); }), "parameter 'blocks.1.weight' is in, or was left by");
    EXPECT_SAYS(error_of([&] { (void)pager.close_window(); }), "call close()");
    zero::GatheredParameters again({net->parameters()[1]}, {.modifier_rank = 1});
    again.close();
    sgd_step(pager, 0.1);
  });
}

TEST_P(Gathered, StayAsLongAsTheScopeAndGoAfterIt) {
  if (GetParam().policy.gather != GatherPolicy::kCopy) return;
  run_ranks(2, [](Rank& rank) {
    Chain net(6);
    Pager pager(rank.world(), named_parameters_of(*net), GetParam().policy);
    const int64_t unit_bytes = 64 * 4;
    {
      const zero::GatheredParameters whole(net);
      EXPECT_EQ(pager.memory().live_bytes, 6 * unit_bytes);
      net->forward(at::ones({1, 8}));
      EXPECT_EQ(pager.memory().live_bytes, 6 * unit_bytes);
    }
    EXPECT_EQ(pager.memory().live_bytes, 2 * unit_bytes);
    pager.release_gathered();
    EXPECT_EQ(pager.memory().live_bytes, 0);
    EXPECT_SAYS(error_of([&] { net->parameters()[5].const_data_ptr(); }), "released");
  });
}

INSTANTIATE_TEST_SUITE_P(Shardings, Gathered, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

TEST(GatheredUnderInit, AreWholeAndTakeARanksValuesBeforeAnEngineIsThere) {
  run_ranks(2, [](Rank& rank) {
    manual_seed(3);
    const Chain plain(4, 40);
    manual_seed(3);
    Chain net = [&] {
      const zero::Init scope(rank.world(), {.smallest_bytes = 64, .live_bytes = 1});
      return Chain(4, 40);
    }();
    const std::vector<at::Tensor> weights = net->parameters();
    {
      const zero::GatheredParameters whole(net);
      for (size_t i = 0; i < weights.size(); ++i)
        EXPECT_EQ(std::memcmp(weights[i].const_data_ptr(), plain->parameters()[i].const_data_ptr(), 6400), 0) << i;
      at::NoGradGuard no_grad;
      EXPECT_SAYS(error_of([&] { at::Tensor(weights[0]).fill_(1); }), "6400 bytes that zero.Init sharded was written");
      EXPECT_SAYS(error_of([&] { Pager pager(rank.world(), named_parameters_of(*net), {}); }),
                  "GatheredParameters scope");
    }
    {
      zero::GatheredParameters whole({weights[2]}, {.modifier_rank = 1});
      if (rank.id() == 1) floats(weights[2])[5] = 7;
      whole.close();
    }
    Pager pager(rank.world(), named_parameters_of(*net), {.stage = 3, .gather = GatherPolicy::kCopy});
    pager.restore();
    EXPECT_EQ(weights[2].view(-1)[5].item<float>(), 7);
    EXPECT_TRUE(at::equal(weights[1], plain->parameters()[1]));
    EXPECT_TRUE(at::equal(weights[3], plain->parameters()[3]));
  });
}

TEST(GatheredUnderInit, AreShardedAlikeWhateverOneRankDoesWithThem) {
  run_ranks(2, [](Rank& rank) {
    std::optional<zero::Init> scope(std::in_place, rank.world(),
                                    zero::InitPolicy{.smallest_bytes = 64, .live_bytes = 2 * 40 * 40 * 4});
    const Chain net(4, 40);
    const std::vector<at::Tensor> weights = net->parameters();
    const at::NoGradGuard no_grad;
    zero::GatheredParameters whole(weights, {.modifier_rank = 0});
    if (rank.id() == 0)
      for (size_t i = weights.size(); i-- > 0;) at::Tensor(weights[i]).fill_(static_cast<double>(i));
    whole.close();  // shards the coldest: to rank 0 these are others
    scope.reset();
    Pager pager(rank.world(), named_parameters_of(*net), {.stage = 3, .gather = GatherPolicy::kCopy});
    pager.restore();
    for (size_t i = 0; i < weights.size(); ++i) EXPECT_EQ(weights[i].view(-1)[5].item<float>(), static_cast<float>(i));
  });
}

TEST(GatheredParameters, NameARankThatIsThere) {
  run_ranks(2, [](Rank& rank) {
    Chain net(1);
    const zero::GatheredParameters of_nobody(net, {.modifier_rank = 0});  // initialize() will give everybody rank 0's
    EXPECT_SAYS(error_of([&] { zero::GatheredParameters whole(net, {.modifier_rank = 1}); }), "is sharded by nobody");
    Pager pager(rank.world(), named_parameters_of(*net), {.stage = 3});
    EXPECT_SAYS(error_of([&] { zero::GatheredParameters whole(net, {.modifier_rank = 2}); }),
                "modifier_rank=2 is no rank of group");
    const zero::GatheredParameters off(net, {.modifier_rank = 2, .enabled = false});
    sgd_step(pager, 0.1);  // nothing is held
  });
}

TEST(ExternalParameter, NeedsNoRegistration) {
  Chain net(1);
  zero::register_external_parameter(*net, net->parameters()[0]);
  zero::unregister_external_parameter(*net, net->parameters()[0]);
  EXPECT_SAYS(error_of([&] { zero::register_external_parameter(*net, net->parameters()[0] * 2); }),
              "expected a parameter (a floating leaf that a module registered), got a tensor that was computed");
  EXPECT_SAYS(error_of([&] { zero::register_external_parameter(*net, at::Tensor()); }), "got an undefined tensor");
  EXPECT_SAYS(error_of([&] { zero::unregister_external_parameter(*net, at::ones({2}, at::kLong)); }),
              "a tensor of Long");
}

}  // namespace
}  // namespace trireme
