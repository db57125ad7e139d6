// The ways in which backward can be called, under every sharding.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "tests/pager/models.h"
#include "tests/pager/training.h"
#include "trireme/pager/pager.h"

namespace trireme {
namespace {

using namespace testing;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

class EveryBackward : public ::testing::TestWithParam<ZeroStage> {
 protected:
  const PagerPolicy& policy() const { return GetParam().policy; }
};
INSTANTIATE_TEST_SUITE_P(Pager, EveryBackward, ::testing::ValuesIn(kZeroStages), name_of_zero_stage);

Program<Chain> chain_program(std::function<void(Chain&)> run) {
  return {.make = [] { return Chain(3); }, .run = [run = std::move(run)](Chain& net, const Turn&) { run(net); }};
}

TEST_P(EveryBackward, SeveralInOneWindowAddUp) {
  const auto program = chain_program([](Chain& net) {
    for (int micro = 0; micro < 3; ++micro) loss_of(net).backward();
  });
  expect_trains_like_one_process(program, policy(), Agreement::kRounding);
}

TEST_P(EveryBackward, ThatReachesAParameterWhichAnEarlierOneReachedAddsUp) {
  const auto program = chain_program([](Chain& net) {
    loss_of(net).backward();
    net->parameters()[1].square().sum().backward();
    net->parameters()[1].sum().backward();
  });
  expect_trains_like_one_process(program, policy(), Agreement::kRounding);
}

TEST_P(EveryBackward, TwiceThroughOneGraphAddsUp) {
  const auto program = chain_program([](Chain& net) {
    const at::Tensor loss = loss_of(net);
    loss.backward({}, /*retain_graph=*/true);
    loss.backward();
  });
  expect_trains_like_one_process(program, policy(), Agreement::kRounding);
}

TEST_P(EveryBackward, WithCreateGraphGivesTheSameGradients) {
  const auto program =
      chain_program([](Chain& net) { loss_of(net).backward({}, /*retain_graph=*/true, /*create_graph=*/true); });
  expect_trains_like_one_process(program, policy());
}

TEST_P(EveryBackward, ThroughAGradientPenaltyGivesSecondDerivatives) {
  const auto program = chain_program([](Chain& net) {
    const at::Tensor loss = loss_of(net);
    const auto gradients =
        torch::autograd::grad({loss}, net->parameters(), {}, /*retain_graph=*/true, /*create_graph=*/true);
    at::Tensor penalty = loss;
    for (const at::Tensor& gradient : gradients) penalty = penalty + gradient.square().sum();
    penalty.backward();
  });
  expect_trains_like_one_process(program, policy());
}

// Recomputation in backward, as torch.utils.checkpoint does it in its reentrant form.
struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, ChainImpl* net) {
    context->save_for_backward({x});
    context->saved_data["net"] = reinterpret_cast<int64_t>(net);
    return net->forward(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    at::AutoGradMode enable(true);
    auto* net = reinterpret_cast<ChainImpl*>(context->saved_data["net"].toInt());
    const at::Tensor x = context->get_saved_variables()[0].detach().requires_grad_();
    torch::autograd::backward({net->forward(x)}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};

TEST_P(EveryBackward, ThatRecomputesTheForwardGivesTheSameWeights) {
  const auto program = chain_program([](Chain& net) {
    const at::Tensor x = at::randn({3, 8}).requires_grad_();
    Recompute::apply(x, net.get()).square().mean().backward();
  });
  expect_trains_like_one_process(program, policy());
}

TEST_P(EveryBackward, ThatReachesAParameterDirectlyAndByRecomputationAddsUp) {
  const auto program = chain_program([](Chain& net) {
    const at::Tensor x = at::randn({3, 8}).requires_grad_();
    const at::Tensor direct = net->forward(x);
    (Recompute::apply(direct, net.get()).square().mean() + direct.sum()).backward();
  });
  expect_trains_like_one_process(program, policy(), Agreement::kRounding);
}

TEST_P(EveryBackward, ThroughAGraphKeptAcrossAStepRaisesTheVersionError) {
  for (const int ranks : {1, 2}) {
    run_ranks(ranks, [&](Rank& rank) {
      manual_seed(3);
      Chain net(3);
      Pager pager(rank.world(), named_parameters_of(*net), policy());
      const at::Tensor loss = loss_of(net);
      loss.backward({}, /*retain_graph=*/true);
      pager.end_backward();
      sgd_step(pager, 0.1);
      const std::string error = error_of([&] { loss.backward(); });
      EXPECT_NE(error.find("modified by an inplace operation"), std::string::npos) << error;
      // The pager is as good as before.
      pager.end_backward();
      sgd_step(pager, 0.1);
      loss_of(net).backward();
      pager.end_backward();
      sgd_step(pager, 0.1);
      pager.restore();
    });
  }
}

TEST_P(EveryBackward, OfALossThatTwoPagersShareTrainsBothModels) {
  struct TwoImpl : torch::nn::Module {
    TwoImpl() : a(register_module("a", Chain(2))), b(register_module("b", Chain(3))) {}
    Chain a, b;
  };
  const Program<std::shared_ptr<TwoImpl>> program{
      .make = [] { return std::make_shared<TwoImpl>(); },
      .run =
          [](std::shared_ptr<TwoImpl>& net, const Turn&) {
            net->b->forward(net->a->forward(at::randn({3, 8}))).square().mean().backward();
          }};
  for (const int ranks : {1, 2, 3}) {
    std::vector<at::Tensor> expected;
    run_ranks(1, [&](Rank&) { expected = plain_weights(program, ranks); });
    run_ranks(ranks, [&](Rank& rank) {
      manual_seed(3);
      auto net = program.make();
      Pager first(rank.world(), named_parameters_of(*net->a), policy());
      Pager second(rank.world(), named_parameters_of(*net->b), policy());
      for (int step = 0; step < program.steps; ++step) {
        manual_seed(100 * step + rank.id());
        program.run(net, {rank.id(), step});
        first.end_backward();
        second.end_backward();
        sgd_step(first, 0.1);
        sgd_step(second, 0.1);
      }
      first.restore();
      second.restore();
      const auto got = net->parameters();
      for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << i << " of " << ranks;
    });
  }
}

TEST_P(EveryBackward, AfterRestoreLeavesGradientsToTheUser) {
  run_ranks(2, [&](Rank& rank) {
    manual_seed(3);
    Chain net(2);
    {
      Pager pager(rank.world(), named_parameters_of(*net), policy());
      loss_of(net).backward();
      EXPECT_FALSE(net->parameters()[0].grad().defined());
      pager.end_backward();
      sgd_step(pager, 0.1);
      pager.restore();
      loss_of(net).backward();
      EXPECT_TRUE(net->parameters()[0].grad().defined());
    }
    loss_of(net).backward();
    EXPECT_TRUE(net->parameters()[0].grad().defined());
  });
}

}  // namespace
}  // namespace trireme
