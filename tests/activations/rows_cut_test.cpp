// Every operator of the table on tensors that are cut at random over two axes, against the whole: uneven ranges,
// several intervals a rank, dims of several stretches, both axes on one dim; values, sizes and gradients under both
// laws.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/activations/ranks_in_a_loop.h"
#include "tests/activations/row_trials.h"
#include "tests/support/operators/cases.h"
#include "tests/support/operators/quiet.h"
#include "trireme/base/error.h"
#include "trireme/intercept/random_streams.h"

namespace trireme::testing {
namespace {

struct Tried {
  ExchangeCounts counts;
  int64_t cases = 0, gradients = 0, local = 0;
};

/// The gradient that a rank's part should have, against what it has. Along an axis of shares on which the tensor is
/// whole, ranks' shares add up.
std::string gradient_problem(const Parts& parts, const at::Tensor& whole_gradient) {
  const AxisGrid& grid = axes().grid;
  const Parts expected = distributed(whole_gradient, parts.placement, axes());
  for (int position = 0; position < grid.positions(); ++position) {
    at::Tensor found = parts.local[position].grad();
    if (!found.defined()) return str("no gradient on rank ", position);
    if (!parts.placement.is_cut_along(0)) {
      found = at::zeros_like(found);
      for (const int one : grid.along(position, 0))
        if (parts.local[one].grad().defined()) found = found + parts.local[one].grad();
    }
    if (!at::allclose(found, expected.local[position] * 2, 1e-8, 1e-9, /*equal_nan=*/true))
      return str("gradient on rank ", position);
  }
  return "";
}

/// The difference from the whole; "": none. `given`: the first tensor, as the ranks have it.
std::string difference(const OperatorCase& one, Random& random, Tried& tried, std::vector<Parts>* results = nullptr,
                       std::vector<at::Tensor>* wholes_of_results = nullptr, const Parts* given = nullptr) {
  const size_t dot = one.op.find('.');
  const auto op = c10::Dispatcher::singleton().findSchema(
      {one.op.substr(0, dot), dot == std::string::npos ? "" : one.op.substr(dot + 1)});
  if (!op) return "there is no operator " + one.op;
  const OperatorRow* const entry = row_of(*op);
  if (entry == nullptr) return "no row";
  std::vector<c10::IValue> arguments = one.arguments;
  for (size_t i = arguments.size(); i < op->schema().arguments().size(); ++i)
    arguments.push_back(op->schema().arguments()[i].default_value().value_or(c10::IValue()));

  const std::vector<bool> is_differentiable = differentiable(*op, arguments);
  std::vector<at::Tensor> wholes;
  for (const at::Tensor& tensor : tensors_among(arguments)) {
    const bool has_gradient = one.is_smooth && is_differentiable[wholes.size()];
    wholes.push_back(tensor.defined() ? tensor.detach().clone() : tensor);
    if (has_gradient) wholes.back().requires_grad_();
  }
  std::vector<Parts> parts;
  for (size_t i = 0; i < wholes.size(); ++i)
    parts.push_back(given != nullptr && i == 0
                        ? *given
                        : distributed(wholes[i],
                                      wholes[i].defined() ? random_placement(random, wholes[i].sizes().vec())
                                                          : Placement(axes().grid.positions()),
                                      axes()));
  const std::vector<at::Tensor> truth = called(*op, with_tensors(arguments, wholes));
  const ExchangeCounts before = tried.counts;
  const std::vector<Parts> found =
      run_on_ranks(*entry, *op, with_tensors(arguments, wholes), parts, axes(), tried.counts);
  tried.local += before.gathers == tried.counts.gathers && before.joins == tried.counts.joins ? 1 : 0;
  if (found.size() != truth.size()) return "another number of results";

  const int positions = axes().grid.positions();
  at::Tensor true_loss;
  ByRank losses(positions);
  for (size_t i = 0; i < truth.size(); ++i) {
    const Parts expected = distributed(truth[i], found[i].placement, axes());
    for (int position = 0; position < positions; ++position)
      if (found[i].local[position].sizes() != expected.local[position].sizes())
        return str("sizes of result ", i, " on rank ", position, ": ", found[i].local[position].sizes(), " and not ",
                   expected.local[position].sizes());
    ExchangeCounts aside;
    const ByRank back = replaced(found[i], Placement(positions), axes(), aside);
    for (const at::Tensor& tensor : back)
      if (!at::allclose(tensor.to(at::kDouble), truth[i].to(at::kDouble), 1e-9, 1e-9, /*equal_nan=*/true))
        return str("values of result ", i);
    if (!truth[i].requires_grad()) continue;
    const at::Tensor weight = at::rand(truth[i].sizes(), at::kDouble);
    const at::Tensor loss = (truth[i] * weight).sum();
    true_loss = true_loss.defined() ? true_loss + loss : loss;
    for (int position = 0; position < positions; ++position) {
      const at::Tensor own = (back[position] * weight).sum();
      losses[position] = losses[position].defined() ? losses[position] + own : own;
    }
  }
  if (results != nullptr) *results = found;
  if (wholes_of_results != nullptr) *wholes_of_results = truth;
  ++tried.cases;
  if (!one.is_smooth || given != nullptr || !true_loss.defined()) return "";
  try {
    torch::autograd::backward({true_loss}, {});
  } catch (const c10::Error&) {
    return "";  // libtorch has none of this call (scatter, of more elements than places)
  }
  torch::autograd::backward(losses, {});
  for (size_t i = 0; i < wholes.size(); ++i)
    if (wholes[i].defined() && wholes[i].requires_grad() && wholes[i].grad().defined())
      if (const std::string problem = gradient_problem(parts[i], wholes[i].grad()); !problem.empty())
        return str(problem, " of argument ", i);
  ++tried.gradients;
  return "";
}

TEST(Rows, OfEveryOperatorGiveThePartsOfTheWhole) {
  const QuietWarnings quiet;
  const int64_t trials = of_environment("TRIREME_ROW_TRIALS", 8), seed = of_environment("TRIREME_ROW_SEED", 1);
  Tried tried;
  for (const NamedCase& named : operator_cases()) {
    Random random(seed);
    manual_seed(seed);
    for (int64_t trial = 0; trial < trials; ++trial) {
      const auto one = named.make(random, {});
      if (!one) continue;
      std::string problem;
      try {
        problem = difference(*one, random, tried);
      } catch (const std::exception& error) {
        problem = error.what();
      }
      EXPECT_EQ(problem, "") << named.name << ", trial " << trial << " of seed " << seed << ": " << text_of(*one);
      if (!problem.empty()) break;
    }
  }
  std::printf(
      "%zu operators, %ld cases: %ld without an exchange of results or a gather, %ld gathers, %ld joins; "
      "gradients of %ld\n",
      operator_cases().size(), static_cast<long>(tried.cases), static_cast<long>(tried.local),
      static_cast<long>(tried.counts.gathers), static_cast<long>(tried.counts.joins),
      static_cast<long>(tried.gradients));
}

TEST(Rows, OfOperatorsInChainsGoOnWithWhatTheyGot) {
  const QuietWarnings quiet;
  const int64_t chains = 10 * of_environment("TRIREME_ROW_TRIALS", 8), seed = of_environment("TRIREME_ROW_SEED", 1);
  std::vector<const NamedCase*> in_chains;
  for (const NamedCase& named : operator_cases())
    if (named.is_in_chains) in_chains.push_back(&named);
  ASSERT_GE(in_chains.size(), 10u);
  Tried tried;
  for (int64_t chain = 0; chain < chains; ++chain) {
    Random random(seed * 1000 + chain);
    manual_seed(seed * 1000 + chain);
    std::vector<int64_t> sizes;
    for (int64_t left = 2 + below(random, 3); left > 0; --left)
      sizes.push_back(one_of<int64_t>(random, {1, 2, 3, 4, 6, 6}));
    at::Tensor whole = at::rand(sizes, at::kDouble) + 0.5;
    Parts given = distributed(whole, random_placement(random, sizes), axes());
    std::string path;
    for (int step = 0; step < 8; ++step) {
      if (whole.dim() < 2 || whole.dim() > 5 || whole.numel() > 3000) break;
      const NamedCase& named = *one_of(random, in_chains);
      auto one = named.make(random, whole.sizes().vec());
      if (!one) continue;
      std::vector<at::Tensor> tensors = tensors_among(one->arguments);
      tensors.front() = whole;
      one->arguments = with_tensors(one->arguments, tensors);
      path += " " + named.name;
      std::vector<Parts> results;
      std::vector<at::Tensor> truth;
      std::string problem;
      try {
        problem = difference(*one, random, tried, &results, &truth, &given);
      } catch (const std::exception& error) {
        problem = error.what();
      }
      ASSERT_EQ(problem, "") << "chain " << chain << " of seed " << seed << ":" << path;
      whole = truth.front().detach().contiguous();
      given = std::move(results.front());
      for (at::Tensor& part : given.local) part = part.detach().contiguous();
    }
  }
}

}  // namespace
}  // namespace trireme::testing
