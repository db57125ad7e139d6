// Exchanges along an axis give, under both laws, the gradients of the program that one rank runs.
#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"
#include "trireme/activations/exchanges.h"
#include "trireme/base/error.h"

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

Cut cut_of(int64_t dim, int64_t outer, Ranges ranges) {
  return {.dim = dim, .outer = outer, .ranges = std::make_shared<const Ranges>(std::move(ranges))};
}

Cut overlapping() { return cut_of(0, 1, {kSize, {{{0, 4}}, {{2, 6}}, {{3, 7}}}}); }
/// One rank has nothing, and nobody has index 4.
Cut with_gaps() { return cut_of(0, 1, {kSize, {{{0, 1}}, {}, {{1, 4}, {5, 7}}}}); }
at::Tensor columns(const at::Tensor& rows) { return rows.unsqueeze(1) * at::arange(1, 6, at::kDouble).mul(0.3).cos(); }

/// Exchanges of blocks; each loss also has x, which every rank has whole.
const std::vector<Case>& recuts() {
  static const std::vector<Case> all = {
      {"recut along the same dim",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank) {
         const at::Tensor moved = axis.recut(part.exp(), uneven(), with_gaps(), "p");
         return axis.sum((moved * slice_of(numbers(9).detach(), with_gaps(), rank)).sum(), "loss") * x.sum();
       },
       [](const at::Tensor& x, const at::Tensor& p) {
         const at::Tensor weights = numbers(9).detach().index_fill(0, at::full({1}, 4, at::kLong), 0);
         return (p.exp() * weights).sum() * x.sum();
       }},
      {"recut to ranges that overlap",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank) {
         const at::Tensor moved = axis.recut(part, uneven(), overlapping(), "p");
         return axis.sum((moved * (rank + 1)).square().cumsum(0).sum(), "loss") * x.sum();
       },
       [](const at::Tensor& x, const at::Tensor& p) {
         at::Tensor loss = at::zeros({}, at::kDouble);
         for (int rank = 0; rank < kRanks; ++rank)
           loss = loss + (slice_of(p, overlapping(), rank) * (rank + 1)).square().cumsum(0).sum();
         return loss * x.sum();
       }},
      {"recut from ranges that overlap",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank) {
         const at::Tensor shared = axis.recut(part, uneven(), overlapping(), "p").exp();
         const at::Tensor back = axis.recut(shared, overlapping(), uneven(), "p");
         return axis.sum((back * own(numbers(9).detach(), rank)).sum(), "loss") * x.sum();
       },
       [](const at::Tensor& x, const at::Tensor& p) { return (p.exp() * numbers(9).detach()).sum() * x.sum(); }},
      {"recut to a later dim and back",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank) {
         const Cut other = cut_of(1, 1, Ranges(5, {{{0, 1}, {4, 5}}, {{1, 4}}, {}}));
         const at::Tensor all = axis.recut(columns(part), uneven(), other, "p").cumsum(0);
         const at::Tensor back = axis.recut(all, other, uneven(), "p");
         return axis.sum((back.square() * own(columns(numbers(9).detach()), rank)).sum(), "loss") * x.sum();
       },
       [](const at::Tensor& x, const at::Tensor& p) {
         return (columns(p).cumsum(0).square() * columns(numbers(9).detach())).sum() * x.sum();
       }},
      {"recut to an earlier dim and back",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank) {
         Cut last = uneven();
         last.dim = 1;
         const Cut first = cut_of(0, 1, Ranges::even(5, kRanks));
         const at::Tensor all = axis.recut(columns(part).t(), last, first, "p").cumsum(1);
         const at::Tensor back = axis.recut(all, first, last, "p").t();
         return axis.sum((back.square() * own(columns(numbers(9).detach()), rank)).sum(), "loss") * x.sum();
       },
       [](const at::Tensor& x, const at::Tensor& p) {
         return (columns(p).cumsum(0).square() * columns(numbers(9).detach())).sum() * x.sum();
       }},
      {"recut between stretches",
       [](AxisExchanges& axis, const at::Tensor& x, const at::Tensor& part, int rank) {
         Cut five = uneven();
         five.outer = 5;
         const Cut one = cut_of(0, 1, Ranges::even(5 * kSize, kRanks));
         const at::Tensor moved = axis.recut(columns(part).t().flatten(), five, one, "p");
         const at::Tensor weights = at::arange(5 * kSize, at::kDouble).cos();
         return axis.sum((moved * slice_of(weights, one, rank)).sum(), "loss") * x.sum();
       },
       [](const at::Tensor& x, const at::Tensor& p) {
         return (columns(p).t().flatten() * at::arange(5 * kSize, at::kDouble).cos()).sum() * x.sum();
       }},
  };
  return all;
}

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
  for (const auto* some : {&cases(), &recuts()})
    for (const Case& one : *some) expect_same(one, GradientLaw::kWhole);
}

TEST(AxisExchanges, OfSharesGiveTheGradientAsTheirMean) {
  for (const auto* some : {&cases(), &recuts()})
    for (const Case& one : *some) expect_same(one, GradientLaw::kShares);
}

TEST(AxisExchanges, RecutRefusesWhatEveryRankHasWhole) {
  run_ranks(kRanks, [&](Rank& rank) {
    const auto axis = std::make_shared<AxisExchanges>(rank.world(), GradientLaw::kWhole, "a test");
    const Cut all = cut_of(0, 1, {kSize, {{{0, kSize}}, {{0, kSize}}, {{0, kSize}}}});
    EXPECT_THROW(axis->recut(numbers(1), all, uneven(), "x"), Error);
    EXPECT_THROW(axis->recut(own(numbers(1), rank.id()), uneven(), all, "x"), Error);
  });
}

TEST(AxisExchanges, RecutSendsNothingWhereEachRankHasWhatItGets) {
  run_ranks(kRanks, [&](Rank& rank) {
    Group& group = rank.world();
    const auto axis = std::make_shared<AxisExchanges>(group, GradientLaw::kWhole, "a test");
    const Cut inside = cut_of(0, 1, {kSize, {{{1, 2}, {5, 6}}, {{3, 5}}, {{6, 7}}}});
    const int64_t before = group.counters().calls;
    const at::Tensor part = own(numbers(1).detach(), rank.id()), moved = axis->recut(part, uneven(), inside, "x");
    EXPECT_EQ(group.counters().calls, before);
    EXPECT_TRUE(at::equal(moved, slice_of(numbers(1).detach(), inside, rank.id())));
    axis->recut(part, uneven(), with_gaps(), "x");
    EXPECT_EQ(group.counters().calls, before + 1);
  });
}

TEST(AxisExchanges, RecutsOfAnyDtypeGiveTheElements) {
  run_ranks(kRanks, [&](Rank& rank) {
    const auto axis = std::make_shared<AxisExchanges>(rank.world(), GradientLaw::kShares, "a test");
    for (const at::ScalarType dtype : {at::kBool, at::kLong, at::kBFloat16}) {
      const at::Tensor whole = at::arange(kSize, at::kDouble).remainder(2).to(dtype);
      const at::Tensor moved = axis->recut(own(whole, rank.id()), uneven(), with_gaps(), "x");
      EXPECT_TRUE(at::equal(moved, slice_of(whole, with_gaps(), rank.id()))) << dtype;
    }
  });
}

TEST(AxisExchanges, RecutOfATensorWithoutElementsGivesNone) {
  run_ranks(kRanks, [&](Rank& rank) {
    const auto axis = std::make_shared<AxisExchanges>(rank.world(), GradientLaw::kShares, "a test");
    const at::Tensor whole = at::zeros({kSize, 0, 5}, at::kDouble);
    const Cut last = cut_of(2, 1, Ranges::even(5, kRanks));
    EXPECT_TRUE(axis->recut(own(whole, rank.id()), uneven(), last, "x")
                    .sizes()
                    .equals(slice_of(whole, last, rank.id()).sizes()));
  });
}

/// A peer that sends other elements than these is found by the record.
TEST(AxisExchanges, TheRecordOfARecutFindsOtherCuts) {
  run_ranks(kRanks, [&](Rank& rank) {
    const auto axis = std::make_shared<AxisExchanges>(rank.world(), GradientLaw::kShares, "a test");
    const Cut to = cut_of(0, 1, Ranges::even(6, kRanks));
    const Cut from = cut_of(0, 1, {6, {{{4, 6}}, {{0, 2}}, {{2, 4}}}});
    const Cut mistaken = cut_of(0, 1, {6, {{{4, 6}}, {{2, 4}}, {{0, 2}}}});
    const at::Tensor part = slice_of(numbers(3).detach(), from, rank.id());
    axis->recut(part, rank.id() == 1 ? mistaken : from, to, "x");
    EXPECT_NE(axis->problem(), "");
  });
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

/// By operator, parameter, direction and way, by the cost line of each collective; between count() and count(false).
TEST(AxisExchanges, CountWhatTheySend) {
  run_ranks(2, [](Rank& rank) {
    const auto axis = std::make_shared<AxisExchanges>(rank.world(), GradientLaw::kWhole, "a test");
    const Cut halves = cut_of(0, 1, Ranges::even(6, 2));
    const Cut stripes = cut_of(0, 1, Ranges(6, {{{0, 1}, {2, 3}, {4, 5}}, {{1, 2}, {3, 4}, {5, 6}}}));
    const auto numbers = [](int64_t size) { return at::ones({size}, at::kDouble).requires_grad_(); };
    const auto exchange = [&] {
      axis->set_parameter("w");
      axis->sum(numbers(6), "f").sum().backward();
      axis->set_parameter("");
      axis->gather_and_enter(numbers(3), halves, "g").sum().backward();
      axis->recut(numbers(3), halves, stripes, "h").sum().backward();
      axis->recut(numbers(3), halves, halves, "nothing moves").sum().backward();
    };
    exchange();
    EXPECT_TRUE(axis->counted("an axis").empty());
    axis->count();
    exchange();
    exchange();
    const auto row = [&](const char* what, ExchangeWay way, int64_t bytes) {
      return ExchangeRow{.axis = "an axis", .what = what, .way = way, .exchanges = 2, .bytes_sent = 2 * bytes};
    };
    const std::vector<ExchangeRow> expected{
        row("f of \"w\" in forward", ExchangeWay::kSum, 6 * 8), row("g in backward", ExchangeWay::kScatter, 3 * 8),
        row("g in forward", ExchangeWay::kGather, 3 * 8), row("h in backward", ExchangeWay::kRecut, 1 * 8),
        row("h in forward", ExchangeWay::kRecut, 1 * 8)};
    EXPECT_EQ(axis->counted("an axis"), expected) << text_of(axis->counted("an axis"));
    EXPECT_EQ(by_bytes({expected[4], expected[0]}).front(), expected[0]);
    axis->count(false);
    exchange();
    EXPECT_TRUE(axis->counted("an axis").empty());
  });
}

}  // namespace
}  // namespace trireme
