#include "trireme/pager/init/init.h"

#include <ATen/ops/broadcast_tensors.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "tests/pager/training.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

/// A zoo of tensors, most of them above Init's 4096 bytes, and re-initialised in parts.
struct ZooImpl : torch::nn::Module {
  ZooImpl()
      : embedding(register_module("embedding", torch::nn::Embedding(200, 32))),
        conv(register_module("conv", torch::nn::Conv2d(16, 24, 5))),
        lstm(register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(32, 32).num_layers(2)))),
        norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({32})))),
        first(register_module("first", torch::nn::Linear(32, 100))),
        second(register_module("second", torch::nn::Linear(100, 32))) {
    mask = register_buffer("mask", at::ones({80, 80}).tril());
    torch::nn::init::xavier_uniform_(first->weight);
    at::NoGradGuard no_grad;
    second->weight.normal_(0, 0.02);
    second->weight.mul_(0.5);
    embedding->weight.select(0, 0).zero_();
    const at::Tensor temporary = at::randn({4000});  // dies in the scope
    second->bias.add_(temporary.mean());
  }
  at::Tensor forward(const at::Tensor& tokens) {
    const at::Tensor x = norm(std::get<0>(lstm->forward(embedding(tokens))));
    return second(first(x).tanh()).matmul(embedding->weight.t());
  }
  torch::nn::Embedding embedding;
  torch::nn::Conv2d conv;
  torch::nn::LSTM lstm;
  torch::nn::LayerNorm norm;
  torch::nn::Linear first, second;
  at::Tensor mask;
};
TORCH_MODULE(Zoo);

constexpr int64_t kLargest = 24 * 16 * 25 * 4;  // the convolution's weight

TEST(Init, GivesTheValuesOfAPlainConstructionBitForBit) {
  for (const int ranks : {1, 2, 4}) {
    run_ranks(ranks, [](Rank& rank) {
      manual_seed(5);
      Zoo plain;
      const at::Tensor next_number = at::randn({1});
      manual_seed(5);
      zero::Init scope(rank.world(), {.live_bytes = 1});
      Zoo sharded;
      EXPECT_TRUE(at::equal(at::randn({1}), next_number));
      const auto expected = plain->named_parameters();
      for (const auto& item : sharded->named_parameters())
        EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key() << " of " << rank.size();
      EXPECT_TRUE(at::equal(sharded->mask, plain->mask));
    });
  }
}

TEST(Init, KeepsNoMoreWholeThanTheLimit) {
  run_ranks(2, [](Rank& rank) {
    for (const int64_t live_bytes : {int64_t{1}, 4 * kLargest}) {
      zero::Init scope(rank.world(), {.live_bytes = live_bytes});
      Zoo net;
      // An operator's own tensors may come on top: the one it made is counted before the coldest goes.
      EXPECT_LE(scope.peak_live_bytes(), std::max(live_bytes, kLargest) + kLargest);
      EXPECT_GE(scope.peak_live_bytes(), kLargest);
    }
  });
}

TEST(Init, HandsOverToAPagerThatTrainsIdentically) {
  for (const ZeroStage& sharding : kZeroStages) {
    for (const int ranks : {1, 2, 4}) {
      run_ranks(ranks, [&](Rank& rank) {
        const auto train = [&](Zoo& net) {
          Pager pager(rank.world(), named_parameters_of(*net), sharding.policy);
          for (int step = 0; step < 2; ++step) {
            manual_seed(10 * step + rank.id());
            net->forward(at::randint(0, 200, {3, 2})).square().mean().backward();
            pager.end_backward();
            sgd_step(pager, 0.1);
          }
          pager.restore();
          return copies_of(net->parameters());
        };
        manual_seed(5);
        Zoo plain;
        manual_seed(5);
        Zoo sharded = [&] {
          zero::Init scope(rank.world(), {.live_bytes = 1});
          return Zoo();
        }();
        const auto expected = train(plain);
        const auto got = train(sharded);
        for (size_t i = 0; i < got.size(); ++i)
          EXPECT_TRUE(at::equal(got[i], expected[i])) << sharding.name << " " << ranks << " " << i;
      });
    }
  }
}

TEST(Init, ReadingAShardedTensorOutsideOfAnOperatorNamesTheScope) {
  run_ranks(2, [](Rank& rank) {
    std::optional<zero::Init> scope(std::in_place, rank.world(), zero::InitPolicy{.live_bytes = 1});
    Zoo net;
    // All that may be whole.
    const at::Tensor other = at::ones({kLargest / 4}), another = at::ones({kLargest / 4});
    scope.reset();
    const auto read = [&] { net->embedding->weight.sum().item<float>(); };
    EXPECT_NE(error_of(read).find("this tensor was sharded by zero.Init"), std::string::npos) << error_of(read);
    EXPECT_NE(error_of([&] { net->embedding->weight.data_ptr(); }).find("zero.Init"), std::string::npos);
  });
}

TEST(Init, MakesATensorWholeForGood) {
  run_ranks(2, [](Rank& rank) {
    manual_seed(5);
    Zoo plain;
    manual_seed(5);
    Zoo net = [&] {
      zero::Init scope(rank.world(), {.live_bytes = 1});
      Zoo made;
      zero::make_whole(made->conv->weight);  // while the scope lives
      return made;
    }();
    zero::make_whole(net->mask);
    zero::make_whole(net->mask);  // nothing left to do
    zero::make_whole(at::ones({3}));
    zero::make_whole(at::Tensor());
    EXPECT_TRUE(at::equal(net->mask, plain->mask));
    EXPECT_TRUE(at::equal(net->conv->weight, plain->conv->weight));
    EXPECT_EQ(StorageHandle::owner_of(*net->mask.storage().unsafeGetStorageImpl()), nullptr);
  });
}

TEST(Init, LeavesTensorsFromBeforeTheScopeAlone) {
  run_ranks(2, [](Rank& rank) {
    const at::Tensor before = at::full({5000}, rank.id());  // another value on every rank
    {
      zero::Init scope(rank.world(), {.live_bytes = 1});
      before.add_(1);
      const at::Tensor view = before.view({50, 100});
      for (int i = 0; i < 5; ++i) const at::Tensor other = at::ones({5000});
      at::add_out(const_cast<at::Tensor&>(before), before, view.view(-1));
    }
    EXPECT_EQ(StorageHandle::owner_of(*before.storage().unsafeGetStorageImpl()), nullptr);
    EXPECT_EQ(before[17].item<int>(), 2 * (rank.id() + 1));
  });
}

TEST(Init, LeavesThemAloneInsideOfAnOpenedOperatorToo) {
  class Opener final : public Pass {
   public:
    PassOrder order() const override { return PassOrder::kRecompute; }
    void run(OperatorCall& call, Next next) override { call.traits.composite ? next.open(call) : next(call); }
  };
  run_ranks(2, [](Rank& rank) {
    Opener opener;
    const InterceptScope opening(InterceptScope::Watch::kWrites, &opener);
    const at::Tensor before = at::ones({64, 64}), other = at::ones({1, 64});
    const zero::Init scope(rank.world(), {.live_bytes = 1});
    const auto views = at::broadcast_tensors({before, other});
    const at::Tensor made = at::ones({64, 64}), more = at::ones({64, 64});
    EXPECT_EQ(views[0].data_ptr(), before.data_ptr());  // neither adopted nor sharded
    EXPECT_EQ(StorageHandle::owner_of(*before.storage().unsafeGetStorageImpl()), nullptr);
    EXPECT_NE(StorageHandle::owner_of(*made.storage().unsafeGetStorageImpl()), nullptr);
  });
}

TEST(Init, ShardsWhatACastMakes) {
  run_ranks(2, [](Rank& rank) {
    manual_seed(5);
    Zoo plain;
    plain->to(at::kBFloat16);
    manual_seed(5);
    zero::Init scope(rank.world(), {.live_bytes = 1});
    Zoo net;
    net->to(at::kBFloat16);
    EXPECT_NE(StorageHandle::owner_of(*net->embedding->weight.storage().unsafeGetStorageImpl()), nullptr);
    EXPECT_TRUE(at::equal(net->embedding->weight, plain->embedding->weight));
    EXPECT_TRUE(at::equal(net->first->weight, plain->first->weight));
  });
}

TEST(Init, OfAParameterThatIsAViewHandsOverItsPart) {
  for (const ZeroStage& sharding : kZeroStages) {
    run_ranks(2, [&](Rank& rank) {
      at::Tensor parameter = [&] {
        zero::Init scope(rank.world(), {.live_bytes = 1});
        const at::Tensor whole = at::arange(6000, at::kFloat);
        for (int i = 0; i < 3; ++i) const at::Tensor other = at::ones({6000});
        return whole.narrow(0, 2000, 2000).detach().requires_grad_();
      }();
      Pager pager(rank.world(), {{"w", parameter}}, sharding.policy);
      EXPECT_TRUE(at::equal(parameter, at::arange(2000, 4000, at::kFloat))) << sharding.name;
      pager.restore();
    });
  }
}

TEST(Init, ScopesNest) {
  run_ranks(2, [](Rank& rank) {
    manual_seed(5);
    Zoo plain;
    manual_seed(5);
    zero::Init outer(rank.world(), {.live_bytes = 1});
    Zoo net = [&] {
      zero::Init inner(rank.world(), {.live_bytes = 1});
      return Zoo();
    }();
    // All that may be whole.
    const at::Tensor other = at::ones({kLargest / 4}), another = at::ones({kLargest / 4});
    const auto expected = plain->named_parameters();
    for (const auto& item : net->named_parameters())
      EXPECT_TRUE(at::equal(item.value(), expected[item.key()])) << item.key();
  });
}

TEST(InitScope, ThatIsNestedShardsOnceAndGivesItsOwnDtype) {
  run_ranks(2, [](Rank& rank) {
    const zero::InitPolicy small{.smallest_bytes = 64, .live_bytes = 1};
    zero::InitPolicy narrow = small;
    narrow.dtype = at::kBFloat16;
    const zero::Init outer(rank.world(), small);
    manual_seed(2);
    torch::nn::Linear first(50, 50);
    int64_t inner_peak = 0;
    torch::nn::Linear second(nullptr);
    {
      const zero::Init inner(rank.world(), narrow);
      second = torch::nn::Linear(50, 50);
      inner_peak = inner.peak_live_bytes();
      const zero::Init off(rank.world(), {.dtype = at::kHalf, .enabled = false});
      EXPECT_EQ(at::ones({4}).scalar_type(), at::kBFloat16);
      EXPECT_EQ(off.peak_live_bytes(), 0);
    }
    const torch::nn::Linear third(50, 50);
    EXPECT_EQ(first->weight.scalar_type(), at::kFloat);
    EXPECT_EQ(second->weight.scalar_type(), at::kBFloat16);
    EXPECT_EQ(third->weight.scalar_type(), at::kFloat);
    EXPECT_GE(inner_peak, 2 * 50 * 50);
    EXPECT_TRUE(second->weight.isfinite().all().item<bool>());
    EXPECT_GT(second->weight.abs().sum().item<float>(), 0);
  });
}

TEST(InitScope, OfRanksThatDrawOtherNumbersHasThoseOfRank0) {
  for (const int64_t live_bytes : {1, 1 << 30})
    run_ranks(2, [&](Rank& rank) {
      manual_seed(0);
      const Zoo plain;
      manual_seed(rank.id());
      Zoo drawn{nullptr};
      {
        const zero::Init scope(rank.world(), {.live_bytes = live_bytes});
        drawn = Zoo();
      }
      const auto expected = plain->named_parameters();
      for (const auto& item : drawn->named_parameters()) {
        zero::GatheredParameters whole({item.value()});
        EXPECT_TRUE(at::equal(item.value().detach().clone(), expected[item.key()])) << item.key();
        whole.close();
      }
    });
}

TEST(InitScope, GivesItsDtypeToWhatIsMadeWithoutOne) {
  run_ranks(1, [](Rank& rank) {
    const zero::Init scope(rank.world(), {.dtype = at::kBFloat16});
    EXPECT_EQ(at::full({2}, 0.5).scalar_type(), at::kBFloat16);
    EXPECT_EQ(at::arange(4, at::kFloat).scalar_type(), at::kFloat);  // told
    EXPECT_EQ(at::full({2}, 3).scalar_type(), at::kLong);            // no floating default
    const at::Tensor told = at::ones({2}, at::kFloat);
    EXPECT_EQ((told * 2).scalar_type(), at::kFloat);  // computed, not made
  });
}

TEST(InitScope, RefusesByNameWhatIsNotThere) {
  run_ranks(1, [](Rank& rank) {
    const auto refusal = [&](const zero::InitPolicy& policy) {
      return error_of([&] { const zero::Init scope(rank.world(), policy); });
    };
    for (const char* there : {"cpu", "none"}) EXPECT_NO_THROW(zero::Init(rank.world(), {.remote_device = there}));
    EXPECT_NE(refusal({.remote_device = "nvme"}).find("remote_device=\"nvme\" is not there yet; use \"cpu\""),
              std::string::npos);
    EXPECT_NE(refusal({.dtype = at::kLong}).find("dtype=Long is not floating"), std::string::npos);
  });
}

}  // namespace
}  // namespace trireme
