// Parameters seen from outside of operators: data_ptr(), saving, another storage, after the pager has gone.
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <cstring>
#include <memory>
#include <sstream>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/base/error.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

const char* const kReleased = "parameter 'blocks.0.weight' is sharded over 2 ranks (ZeRO stage 3) and released";

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

bool releases(const PagerPolicy& policy) { return policy.stage == 3 && policy.gather == GatherPolicy::kCopy; }

class EveryAccess : public ::testing::TestWithParam<ZeroStage> {
 protected:
  const PagerPolicy& policy() const { return GetParam().policy; }
  /// Runs `body` on two ranks with a pager whose first parameter has the values `expected`.
  using Body = std::function<void(Chain&, const at::Tensor& expected, std::unique_ptr<Pager>&)>;
  void with_pager(const Body& body) const {
    run_ranks(2, [&](Rank& rank) {
      manual_seed(3);
      Chain net(4);
      const at::Tensor expected = net->parameters()[0].detach().clone();
      auto pager = std::make_unique<Pager>(rank.world(), named_parameters_of(*net), policy());
      body(net, expected, pager);
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Pager, EveryAccess, ::testing::ValuesIn(kZeroStages), testing::name_of_zero_stage);

TEST_P(EveryAccess, ToTheDataIsRightOrANamedErrorAndNeverNull) {
  with_pager([&](Chain& net, const at::Tensor& expected, std::unique_ptr<Pager>& pager) {
    const at::Tensor weight = net->parameters()[0];
    if (releases(policy())) {
      EXPECT_TRUE(has(error_of([&] { weight.data_ptr(); }), kReleased)) << error_of([&] { weight.data_ptr(); });
      EXPECT_TRUE(has(error_of([&] { weight.const_data_ptr(); }), kReleased));
      EXPECT_TRUE(has(error_of([&] { weight.mutable_data_ptr(); }), kReleased));
      EXPECT_TRUE(has(error_of([&] { weight.data_ptr<float>(); }), kReleased));
      EXPECT_TRUE(has(error_of([&] { weight.accessor<float, 2>(); }), kReleased));
      EXPECT_TRUE(has(error_of([&] { weight.storage().data(); }), kReleased));
      EXPECT_TRUE(has(error_of([&] { weight.storage().mutable_data(); }), kReleased));
    } else {
      EXPECT_EQ(std::memcmp(weight.const_data_ptr(), expected.const_data_ptr(), weight.nbytes()), 0);
    }
    EXPECT_TRUE(at::equal(weight, expected));  // an operator makes it whole
    EXPECT_EQ(std::memcmp(weight.const_data_ptr(), expected.const_data_ptr(), weight.nbytes()), 0);
    pager->restore();
  });
}

TEST_P(EveryAccess, BySavingWritesTheValuesOrIsANamedError) {
  with_pager([&](Chain& net, const at::Tensor& expected, std::unique_ptr<Pager>& pager) {
    std::ostringstream out;
    const auto save = [&] { torch::save(net, out); };
    if (releases(policy())) {
      EXPECT_SAYS(error_of(save), kReleased);
    } else {
      save();
      Chain loaded(4);
      std::istringstream in(out.str());
      torch::load(loaded, in);
      EXPECT_TRUE(at::equal(loaded->parameters()[0], expected));
    }
    // An operator's result from it is an ordinary tensor.
    std::ostringstream clone;
    torch::save(net->parameters()[0].detach().clone(), clone);
    at::Tensor read;
    std::istringstream in(clone.str());
    torch::load(read, in);
    EXPECT_TRUE(at::equal(read, expected));
    pager->restore();
  });
}

TEST_P(EveryAccess, AfterRestoreIsToOrdinaryMemory) {
  with_pager([&](Chain& net, const at::Tensor& expected, std::unique_ptr<Pager>& pager) {
    {
      at::NoGradGuard no_grad;
      net->parameters()[0].add_(1);
    }
    pager->restore();
    const at::Tensor weight = net->parameters()[0];
    EXPECT_EQ(StorageHandle::owner_of(*weight.storage().unsafeGetStorageImpl()), nullptr);
    EXPECT_TRUE(at::equal(weight, expected + 1));
    {
      at::NoGradGuard no_grad;
      weight.add_(1);  // each rank's own
      EXPECT_TRUE(at::equal(weight, expected + 1 + 1));
      EXPECT_TRUE(weight.storage().resizable());
    }
    EXPECT_TRUE(has(error_of([&] { pager->restore(); }), "restore: the pager manages nothing any more"));
    EXPECT_TRUE(has(error_of([&] { (void)pager->close_window(); }),
                    "close_window: the parameters were given back by restore()"));
  });
}

TEST_P(EveryAccess, AfterThePagerIsGoneIsRightWhereTheParameterWasWhole) {
  with_pager([&](Chain& net, const at::Tensor& expected, std::unique_ptr<Pager>& pager) {
    net->parameters()[0].sum();  // whole under every policy
    pager.reset();
    EXPECT_TRUE(at::equal(net->parameters()[0], expected));
    const auto read = [&] { net->parameters()[3].sum().item<float>(); };
    if (releases(policy()))
      EXPECT_SAYS(error_of(read), "parameter 'blocks.3.weight' is sharded");
    else
      read();
  });
}

TEST_P(EveryAccess, AfterThePagerIsGoneSeesTheUsersLastWrite) {
  with_pager([&](Chain& net, const at::Tensor& expected, std::unique_ptr<Pager>& pager) {
    at::NoGradGuard no_grad;
    net->parameters()[0].add_(1);
    pager.reset();
    // Whatever is allocated now must not be what the parameter points at.
    const at::Tensor other = at::zeros({8, 8});
    EXPECT_TRUE(at::equal(net->parameters()[0], expected + 1));
  });
}

TEST_P(EveryAccess, ByAnotherPagerIsRefusedWhileTheFirstOneLives) {
  run_ranks(2, [&](Rank& rank) {
    Chain net(2);
    Pager pager(rank.world(), named_parameters_of(*net), policy());
    const std::string error = error_of([&] { Pager(rank.world(), named_parameters_of(*net), policy()); });
    EXPECT_TRUE(has(error, "parameter 'blocks.0.weight' is managed by another engine already")) << error;
    pager.restore();
    Pager second(rank.world(), named_parameters_of(*net), policy());
    second.restore();
  });
}

TEST_P(EveryAccess, ByReplacingTheStorageIsNoticedByName) {
  with_pager([&](Chain& net, const at::Tensor& expected, std::unique_ptr<Pager>& pager) {
    net->parameters()[0].set_data(expected.clone());
    const std::string error = error_of([&] { (void)pager->close_window(); });
    EXPECT_TRUE(has(error, "parameter 'blocks.0.weight' was given another storage (set_data")) << error;
  });
}

TEST_P(EveryAccess, ByResizingIsRefused) {
  with_pager([&](Chain& net, const at::Tensor& expected, std::unique_ptr<Pager>& pager) {
    at::NoGradGuard no_grad;
    EXPECT_NE(error_of([&] { net->parameters()[0].resize_({100, 100}); }), "");
    EXPECT_TRUE(at::equal(net->parameters()[0], expected));
    pager->restore();
  });
}

TEST(Pager, RefusesByNameWhatItCannotManage) {
  run_ranks(1, [](Rank& rank) {
    const auto refusal = [&](const std::vector<NamedParameter>& parameters, const PagerPolicy& policy = {}) {
      return error_of([&] { Pager(rank.world(), parameters, policy); });
    };
    const at::Tensor fine = at::zeros({4}).requires_grad_();
    EXPECT_TRUE(has(refusal({{"w", at::zeros({4}, at::kDouble)}}), "parameter 'w' is of dtype Double"));
    EXPECT_TRUE(has(refusal({{"w", fine * 2}}), "parameter 'w' is no leaf"));
    EXPECT_TRUE(has(refusal({{"w", at::zeros({4}).to_sparse()}}), "parameter 'w' has no dense storage"));
    EXPECT_TRUE(has(refusal({{"w", at::zeros({4}, at::kMeta)}}), "parameter 'w' is on meta"));
    EXPECT_TRUE(has(refusal({{"v", fine}, {"w", fine.detach()}}),
                    "parameters 'v' and 'w' are two tensors over the same memory"));
    EXPECT_TRUE(has(refusal({{"w", fine}}, {.stage = 4}), "zero_optimization.stage: 4 is no ZeRO stage"));
    EXPECT_TRUE(has(refusal({{"w", fine}}, {.accumulation_dtype = at::kDouble}), "data_types.grad_accum_dtype"));
  });
}

TEST(Pager, TakesParametersThatShareOneBufferWithoutOverlap) {
  run_ranks(2, [](Rank& rank) {
    for (const ZeroStage& sharding : kZeroStages) {
      const at::Tensor buffer = at::arange(20, at::kFloat);
      std::vector<NamedParameter> parameters;
      for (int i = 0; i < 2; ++i)
        parameters.push_back({str("block", i, ".w"), buffer.narrow(0, 10 * i, 10).detach().requires_grad_()});
      Pager pager(rank.world(), parameters, sharding.policy);
      for (int i = 0; i < 2; ++i)
        EXPECT_TRUE(at::equal(parameters[i].tensor, at::arange(10 * i, 10 * i + 10, at::kFloat)));
      pager.restore();
    }
  });
}

TEST(Pager, GivesEveryRankTheValuesOfRank0) {
  for (const ZeroStage& sharding : kZeroStages) {
    run_ranks(3, [&](Rank& rank) {
      manual_seed(rank.id());
      Chain net(2);
      manual_seed(0);
      Chain first(2);
      Pager pager(rank.world(), named_parameters_of(*net), sharding.policy);
      for (int i = 0; i < 2; ++i) EXPECT_TRUE(at::equal(net->parameters()[i], first->parameters()[i])) << sharding.name;
      pager.restore();
    });
  }
}

}  // namespace
}  // namespace trireme
