// Exchanges along an axis give, under both laws, the gradients of the program that one rank runs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "trireme/activations/exchanges.h"

namespace trireme {
namespace {

constexpr int kRanks = 3;
constexpr int64_t kSize = 7;

at::Tensor numbers(double from) { return at::arange(kSize, at::kDouble).add(from).mul(0.37).sin().requires_grad_(); }

Cut uneven() {
  return {.dim = 0,
          .ranges = std::make_shared<const Ranges>(
              kSize, std::vector<std::vector<Interval>>{{{0, 2}, {5, 6}}, {{2, 5}}, {{6, 7}}})};
}

/// A program of a whole tensor x and a tensor p, of which each rank has a part: its loss, on every rank.
using Program = std::function<at::Tensor(AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank)>;

struct Case {
  std::string name;
  Program on_ranks;
  std::function<at::Tensor(const at::Tensor& x, const at::Tensor& p)> on_one;
};

at::Tensor own(const at::Tensor& whole, int rank) { return slice_of(whole, uneven(), rank); }

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"take and sum",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank) {
         return axis.sum((own(axis.enter(x, "x"), rank) * part.exp()).sum(), "loss");
       },
       [](const at::Tensor& x, const at::Tensor& p) { return (x * p.exp()).sum(); }},
      {"gather",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int) {
         return (axis.gather(part.exp(), uneven(), "p") * x).sum();
       },
       [](const at::Tensor& x, const at::Tensor& p) { return (p.exp() * x).sum(); }},
      {"gather and enter",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank) {
         const at::Tensor all = axis.gather_and_enter(part, uneven(), "p");
         return axis.sum((own(axis.enter(x, "x"), rank) * all.sum().exp()).sum(), "loss");
       },
       [](const at::Tensor& x, const at::Tensor& p) { return (x * p.sum().exp()).sum(); }},
      {"scatter",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank) {
         const at::Tensor summand = axis.enter(x, "x") * static_cast<double>(rank + 1);
         return axis.sum((axis.scatter(summand, uneven(), "x").exp() * part).sum(), "loss");
       },
       [](const at::Tensor& x, const at::Tensor& p) { return ((x * 6).exp() * p).sum(); }},
  };
  return all;
}

void expect_same(const Case& one, GradientLaw law) {
  const at::Tensor x = numbers(1), p = numbers(5);
  const at::Tensor loss = one.on_one(x, p);
  loss.backward();
  run_ranks(kRanks, [&](Rank& rank) {
    Group& group = rank.world();
    const auto axis = std::make_shared<AxisExchanges>(group, law, "a test");
    const at::Tensor own_x = numbers(1), part = own(numbers(5).detach(), group.rank()).clone().requires_grad_();
    const at::Tensor own_loss = one.on_ranks(*axis, own_x, part, group.rank());
    own_loss.backward();
    EXPECT_TRUE(at::allclose(own_loss, loss)) << one.name;
    // Shares are as many times too large as there are ranks, and their mean is the gradient.
    at::Tensor of_x = own_x.grad().clone(), of_part = part.grad().clone();
    if (law == GradientLaw::kShares) {
      group.all_reduce(of_x).wait();
      of_x.div_(kRanks);
      of_part.div_(kRanks);
    }
    EXPECT_TRUE(at::allclose(of_x, x.grad())) << one.name << " on rank " << group.rank();
    EXPECT_TRUE(at::allclose(of_part, own(p.grad(), group.rank()))) << one.name << " on rank " << group.rank();
    EXPECT_EQ(axis->problem(), "") << one.name;
  });
}

TEST(AxisExchanges, OfWholesGiveEachRankTheGradient) {
  for (const Case& one : cases()) expect_same(one, GradientLaw::kWhole);
}

TEST(AxisExchanges, OfSharesGiveTheGradientAsTheirMean) {
  for (const Case& one : cases()) expect_same(one, GradientLaw::kShares);
}

TEST(AxisExchanges, OfPartsThatOverlapAddUpWhatTheyShare) {
  const Cut cut{.dim = 0,
                .ranges = std::make_shared<const Ranges>(
                    kSize, std::vector<std::vector<Interval>>{{{0, 4}}, {{2, 6}}, {{3, 7}}})};
  run_ranks(kRanks, [&](Rank& rank) {
    Group& group = rank.world();
    const auto axis = std::make_shared<AxisExchanges>(group, GradientLaw::kWhole, "a test");
    const at::Tensor part = slice_of(numbers(5).detach(), cut, group.rank()).clone().requires_grad_();
    axis->share(part, cut, "p").sum().backward();
    const at::Tensor holders = at::zeros({kSize}, at::kDouble);
    for (int rank = 0; rank < kRanks; ++rank) holders.index_add_(0, cut.index_of(rank), at::ones({4}, at::kDouble));
    EXPECT_TRUE(at::equal(part.grad(), slice_of(holders, cut, group.rank())));
    // An element that several ranks have counts once in what is gathered.
    const at::Tensor again = slice_of(numbers(5).detach(), cut, group.rank()).clone().requires_grad_();
    axis->gather(again, cut, "p").sum().backward();
    const at::Tensor count = at::zeros({kSize}, at::kDouble).index_put({cut.index_of(group.rank())}, again.grad());
    group.all_reduce(count).wait();
    EXPECT_TRUE(at::equal(count, at::ones({kSize}, at::kDouble)));
  });
}

}  // namespace
}  // namespace trireme
