// Uses that models make of their parameters, under every sharding, compared with one process of plain libtorch.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/functional.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;

class EveryUse : public ::testing::TestWithParam<ZeroStage> {
 protected:
  const PagerPolicy& policy() const { return GetParam().policy; }
};
INSTANTIATE_TEST_SUITE_P(Pager, EveryUse, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

TEST_P(EveryUse, OfViewsOfWeights) {
  const Program<Loose> program{.make =
                                   [] {
                                     return Loose(std::vector<std::vector<int64_t>>{{6, 8}, {8, 5}, {40}});
                                   },
                               .run =
                                   [](Loose& net, const Turn&) {
                                     const at::Tensor x = at::randn({4, 8}).matmul((*net)[0].t()).tanh();
                                     const at::Tensor part = (*net)[0].narrow(0, 1, 4).matmul((*net)[1]);
                                     const at::Tensor y = x.narrow(1, 2, 4).matmul(part);
                                     (y * (*net)[2].view({8, 5}).select(0, 3)).square().mean().backward();
                                   }};
  expect_trains_like_one_process(program, policy());
}

TEST_P(EveryUse, OfOneTensorInSeveralPlaces) {
  const Program<Loose> program{.make =
                                   [] {
                                     return Loose(std::vector<std::vector<int64_t>>{{11, 6}, {6, 6}});
                                   },
                               .run =
                                   [](Loose& net, const Turn&) {
                                     const at::Tensor tokens = at::randint(0, 11, {5});
                                     at::Tensor x = at::embedding((*net)[0], tokens);
                                     for (int i = 0; i < 3; ++i) x = x.matmul((*net)[1]).tanh();
                                     at::log_softmax(x.matmul((*net)[0].t()), 1).mean().neg().backward();
                                   }};
  expect_trains_like_one_process(program, policy());
}

TEST_P(EveryUse, OfFrozenParameters) {
  const Program<Chain> program{.make =
                                   [] {
                                     Chain net(4);
                                     net->parameters()[1].set_requires_grad(false);
                                     return net;
                                   },
                               .run =
                                   [](Chain& net, const Turn&) {
                                     net->forward(at::randn({3, 8})).square().mean().backward();
                                   }};
  expect_trains_like_one_process(program, policy());
}

TEST_P(EveryUse, OutsideOfTheModelInARegulariser) {
  const Program<Chain> program{.make = [] { return Chain(3); },
                               .run =
                                   [](Chain& net, const Turn&) {
                                     at::Tensor loss = net->forward(at::randn({3, 8})).square().mean();
                                     for (const at::Tensor& p : net->parameters())
                                       loss = loss + 0.01 * p.norm() + 0.1 * p.square().sum();
                                     loss.backward();
                                   }};
  expect_trains_like_one_process(program, policy());
}

TEST_P(EveryUse, OfConvolutionsInChannelsLastAndTransposedAndScalarAndEmptyParameters) {
  struct OddImpl : torch::nn::Module {
    OddImpl()
        : conv(register_module("conv", torch::nn::Conv2d(3, 4, 3))),
          norm(register_module("norm", torch::nn::BatchNorm2d(4))),
          transposed(register_parameter("transposed", at::randn({5, 4}).t())),
          scalar(register_parameter("scalar", at::randn({}))),
          empty(register_parameter("empty", at::zeros({0, 4}))) {
      conv->weight.set_data(conv->weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    }
    at::Tensor forward(const at::Tensor& x) {
      const at::Tensor features = norm(conv(x)).mean({2, 3});
      return features.matmul(transposed) * scalar + at::linear(features, empty).sum();
    }
    torch::nn::Conv2d conv;
    torch::nn::BatchNorm2d norm;
    at::Tensor transposed, scalar, empty;
  };
  const Program<std::shared_ptr<OddImpl>> program{
      .make = [] { return std::make_shared<OddImpl>(); },
      .run =
          [](std::shared_ptr<OddImpl>& net, const Turn&) {
            net->forward(at::randn({2, 3, 5, 5})).square().mean().backward();
          }};
  expect_trains_like_one_process(program, policy());
}

TEST_P(EveryUse, OfAParameterThatNoRankUsesLeavesItAlone) {
  for (const int ranks : {1, 2, 3}) {
    run_ranks(ranks, [&](Rank& rank) {
      Chain net(3);
      auto unused = net->register_parameter("unused", at::full({50}, 2.0f));
      Pager pager(rank.world(), named_parameters_of(*net), policy());
      for (int step = 0; step < 2; ++step) {
        net->forward(at::randn({3, 8})).sum().backward();
        pager.end_backward();
        const EndedWindow window = sgd_step(pager, 0.1);
        for (size_t i = 0; i < window.touched.size(); ++i)
          EXPECT_EQ(window.touched[i], pager.parameters()[i].name != "unused") << pager.parameters()[i].name;
      }
      EXPECT_TRUE(at::equal(unused, at::full({50}, 2.0f)));
      pager.restore();
    });
  }
}

TEST_P(EveryUse, OfAParameterOnSomeRanksOnlyCountsTheOthersAsZero) {
  // Two parameters of one unit: under the copy policy every rank has to touch the same units.
  struct PairImpl : torch::nn::Module {
    PairImpl() : a(register_parameter("a", at::full({70}, 1.0f))), b(register_parameter("b", at::full({70}, 1.0f))) {}
    at::Tensor a, b;
  };
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [&](Rank& rank) {
      auto net = std::make_shared<PairImpl>();
      Pager pager(rank.world(), named_parameters_of(*net), policy());
      at::Tensor loss = net->a.sum();
      if (rank.id() == 1) loss = loss + net->b.sum() * static_cast<double>(ranks);
      loss.backward();
      pager.end_backward();
      const EndedWindow window = sgd_step(pager, 0.5);
      EXPECT_TRUE(window.touched[0] && window.touched[1]);
      // d/da = 1 on every rank; d/db = ranks on one rank, the mean is 1. 70 + 70 ones.
      EXPECT_DOUBLE_EQ(sum_over(rank.world(), window.squares), 140);
      pager.restore();
      EXPECT_TRUE(at::equal(net->a, at::full({70}, 0.5f)));
      EXPECT_TRUE(at::equal(net->b, at::full({70}, 0.5f)));
    });
  }
}

TEST_P(EveryUse, OfABiasOnOneRankOnlyDoesNotHoldUpGathersInBackward) {
  // Rank 1 cannot send the last blocks before its pass ends, and needs rank 0 in gathers of the first ones until then.
  struct BlockImpl : torch::nn::Module {
    BlockImpl() : w(register_parameter("w", at::eye(8))), b(register_parameter("b", at::zeros({8}))) {}
    at::Tensor w, b;
  };
  run_ranks(2,
            [&](Rank& rank) {
              torch::nn::ModuleList blocks;
              for (int i = 0; i < 8; ++i) blocks->push_back(std::make_shared<BlockImpl>());
              Pager pager(rank.world(), named_parameters_of(*blocks), policy());
              for (int step = 0; step < 2; ++step) {
                at::Tensor x = at::ones({2, 8});
                for (size_t i = 0; i < blocks->size(); ++i) {
                  auto* block = blocks[i]->as<BlockImpl>();
                  x = x.matmul(block->w).tanh();
                  if (rank.id() == 0 || i < 7) x = x + block->b;
                }
                x.square().mean().backward();
                pager.end_backward();
                const EndedWindow window = sgd_step(pager, 0.1);
                EXPECT_EQ(std::count(window.touched.begin(), window.touched.end(), true), 16);
              }
              pager.restore();
            },
            {.timeout = std::chrono::seconds(10)});
}

TEST_P(EveryUse, ByOneRankAloneInAWindowCountsAsAMeanOverAll) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](Rank& rank) {
      struct OneImpl : torch::nn::Module {
        OneImpl() : a(register_parameter("a", at::full({70}, 1.0f))) {}
        at::Tensor a;
      };
      auto net = std::make_shared<OneImpl>();
      Pager pager(rank.world(), named_parameters_of(*net), policy());
      // Nobody calls end_backward(): close_window() does the same, also for a rank that had nothing to do.
      const at::Tensor loss = net->a.sum() * static_cast<double>(ranks);
      if (rank.id() == 0) loss.backward();
      sgd_step(pager, 0.5);
      pager.restore();
      EXPECT_TRUE(at::equal(net->a, at::full({70}, 0.5f)));
    });
  }
}

TEST_P(EveryUse, InBfloat16SumsInTheAccumulationDtype) {
  for (const at::ScalarType accumulation : {at::kFloat, at::kBFloat16}) {
    for (const int ranks : {1, 2, 4}) {
      run_ranks(ranks, [&](Rank& rank) {
        PagerPolicy sharding = policy();
        sharding.accumulation_dtype = accumulation;
        Loose net(std::vector<std::vector<int64_t>>{{3, 40}, {7}});
        net->to(at::kBFloat16);
        net->weights = net->parameters();
        Pager pager(rank.world(), named_parameters_of(*net), sharding);
        // Gradients are 1 + rank / 64 in bf16 (exact); their mean is exact in fp32 and rounded once in bf16.
        const at::Tensor gradient = at::full({3, 40}, 1.0 + rank.id() / 64.0, at::kBFloat16);
        ((*net)[0] * gradient).sum().backward();
        pager.end_backward();
        ClosedWindow window = pager.close_window();
        window.meet();
        const double mean = 1.0 + (ranks - 1) / 128.0;
        const at::Tensor expected = at::full({}, mean, at::kFloat).to(accumulation);
        const UnitLayout& unit = pager.layout().units[0];
        const OwnedSlice& slice = pager.owned()[0];
        ASSERT_EQ(slice.gradients.scalar_type(), accumulation);
        for (const ParameterRange& range : ranges_of(unit, slice.begin, slice.gradients.numel())) {
          const at::Tensor part = slice.gradients.narrow(0, range.slice_begin, range.numel);
          EXPECT_TRUE(part.eq(expected).all().item<bool>()) << accumulation << " " << ranks << " ranks";
        }
        window.publish(0);
        window.publish(1);
        window.open();
        pager.restore();
      });
    }
  }
}

}  // namespace
}  // namespace trireme
