// The pass on ranks of two axes, one of each law of gradients, as threads with real exchanges: every operator of the
// table, tensors cut at random, against the whole.
#include "trireme/activations/axis_pass.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/index.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/pad.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <regex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/activations/row_trials.h"
#include "tests/support/error_of.h"
#include "tests/support/operators/quiet.h"
#include "tests/support/run_ranks.h"
#include "trireme/intercept/random_streams.h"

namespace trireme::testing {
namespace {

class NoPolicy final : public AxisPolicy {
 public:
  explicit NoPolicy(Undivided undivided) : undivided_(undivided) {}
  Undivided undivided() const override { return undivided_; }
  std::string name() const override { return "a test"; }
  std::string fix_for_unknown(const c10::OperatorHandle&) const override { return "nothing"; }

 private:
  const Undivided undivided_;
};

/// A call on wholes, how ranks have its tensors, and what it gives.
struct Trial {
  std::string text;
  c10::OperatorHandle op;
  std::vector<c10::IValue> arguments;
  std::vector<at::Tensor> wholes = {};  ///< with their gradients
  std::vector<Parts> parts = {};
  std::vector<at::Tensor> truth = {};
};

at::Tensor weight_of(const at::Tensor& result) {
  return at::arange(result.numel(), at::kDouble).mul(0.7).add(0.3).sin().view(result.sizes());
}

void backward(const std::vector<at::Tensor>& results) {
  at::Tensor loss;
  for (const at::Tensor& one : results) {
    if (!one.requires_grad()) continue;
    const at::Tensor term = (one * weight_of(one)).sum();
    loss = loss.defined() ? loss + term : term;
  }
  if (loss.defined()) torch::autograd::backward({loss}, {});
}

/// Nothing: libtorch gives no gradient of this call.
std::optional<Trial> trial_of(const OperatorCase& one, Random& random) {
  const size_t dot = one.op.find('.');
  const auto op = c10::Dispatcher::singleton().findSchema(
      {one.op.substr(0, dot), dot == std::string::npos ? "" : one.op.substr(dot + 1)});
  Trial trial{.text = text_of(one), .op = *op, .arguments = one.arguments};
  for (size_t i = trial.arguments.size(); i < op->schema().arguments().size(); ++i)
    trial.arguments.push_back(op->schema().arguments()[i].default_value().value_or(c10::IValue()));
  const std::vector<bool> is_differentiable = differentiable(*op, trial.arguments);
  for (const at::Tensor& tensor : tensors_among(trial.arguments)) {
    const bool has_gradient = one.is_smooth && is_differentiable[trial.wholes.size()];
    at::Tensor whole = tensor.defined() ? tensor.detach().clone() : tensor;
    if (has_gradient) whole.requires_grad_();
    const Placement placement =
        whole.defined() ? random_placement(random, whole.sizes().vec()) : Placement(axes().grid.positions());
    trial.parts.push_back(distributed(whole, placement, axes()));
    trial.wholes.push_back(std::move(whole));
  }
  trial.truth = called(*op, with_tensors(trial.arguments, trial.wholes));
  try {
    if (one.is_smooth) backward(trial.truth);
  } catch (const c10::Error&) {
    return std::nullopt;
  }
  return trial;
}

/// The pass of a rank of the grid, the last axis the fastest.
std::unique_ptr<AxisPass> pass_of(const std::vector<std::unique_ptr<Group>>& groups,
                                  const std::vector<GradientLaw>& laws, const std::vector<Undivided>& undivided) {
  std::vector<PassAxis> own;
  for (size_t axis = 0; axis < groups.size(); ++axis)
    own.push_back({std::make_shared<AxisExchanges>(*groups[axis], laws[axis], "a test"),
                   std::make_unique<NoPolicy>(undivided[axis])});
  return std::make_unique<AxisPass>(PassOrder::kTensor, std::move(own));
}
std::unique_ptr<AxisPass> pass_of(const std::vector<std::unique_ptr<Group>>& groups,
                                  Undivided undivided = Undivided::kGather) {
  return pass_of(groups, axes().laws, {groups.size(), undivided});
}

std::vector<std::unique_ptr<Group>> groups_of(Group& world, const AxisGrid& grid = axes().grid) {
  std::vector<std::unique_ptr<Group>> groups;
  for (int axis = 0; axis < grid.axes(); ++axis) {
    std::vector<std::vector<int>> parts;
    for (int position = 0; position < grid.positions(); ++position)
      if (grid.rank(position, axis) == 0) parts.push_back(grid.along(position, axis));
    groups.push_back(world.split(parts, str("axis ", axis)));
  }
  return groups;
}

enum class ToldBy : uint8_t { kDeclared, kParts };  ///< how a pass is told of tensors that are cut

at::Tensor own_elements(const at::Tensor& tensor) {
  PartTensor* const part = PartTensor::of(tensor);
  return part != nullptr ? part->local() : tensor;
}

/// The most elements that a rank had after one of the last all-gathers of a group.
int64_t most_gathered(const Group& group, int64_t calls) {
  std::istringstream record(group.flight_record());
  std::vector<std::string> lines;
  for (std::string line; std::getline(record, line);) lines.push_back(line);
  int64_t most = 0;
  for (int64_t i = 0; i < calls && i < static_cast<int64_t>(lines.size()); ++i) {
    const std::string& line = lines[lines.size() - 1 - i];
    std::smatch found;
    static const std::regex kGather("^all_gather.*?numel ([0-9]+)");
    if (std::regex_search(line, found, kGather)) most = std::max<int64_t>(most, std::stoll(found[1]));
  }
  return most;
}

/// Whether more was gathered along an axis than a rank has anyway, or than small results of the ranks are together.
/// Where both axes cut something, the later one makes small what was large when the first one was decided.
std::string gathers_much(AxisPass& pass, int axis, int64_t calls, const Trial& trial,
                         const std::vector<at::Tensor>& results) {
  int64_t largest = 0;
  std::map<int64_t, int64_t> sent_for;  // elements of parts, each as large as the largest, and of the whole
  for (const Parts& one : trial.parts) {
    if (!one.local.front().defined()) continue;
    if (one.placement.is_cut_along(1 - axis)) return "";
    int64_t most = 0, sum = 0;
    for (const int other : pass.grid().along(pass.position(), axis)) {
      most = std::max(most, one.local[other].numel());
      sum += one.local[other].numel();
    }
    largest = std::max(largest, is_of_numbers(one.local.front()) ? sum : most);
    if (one.placement.is_cut_along(axis)) sent_for[most * pass.grid().ranks(axis)] = sum;
  }
  int64_t most = largest;
  for (const at::Tensor& one : results) {
    if (!one.defined()) continue;
    const auto known = pass.find(one);
    const int64_t count = own_elements(one).numel();
    if (known && known->is_cut() && known->placement->is_cut_along(axis))
      most = std::max(most, count);
    else if (count <= std::max<int64_t>(largest, pass.grid().ranks(axis)))
      most = std::max(most, count * pass.grid().ranks(axis));
  }
  int64_t gathered = most_gathered(pass.group(axis), calls);
  if (const auto found = sent_for.find(gathered); found != sent_for.end()) gathered = found->second;
  return gathered > most ? str("gathers ", gathered, " elements along axis ", axis, ", and has ", most) : "";
}

/// The difference of this rank from the whole; "": none.
std::string difference(AxisPass& pass, const Trial& trial, ToldBy told, Undivided undivided = Undivided::kGather) {
  std::vector<at::Tensor> own;
  for (size_t i = 0; i < trial.parts.size(); ++i) {
    const at::Tensor& part = trial.parts[i].local[pass.position()];
    own.push_back(part.defined() ? part.detach().clone() : part);
    if (!part.defined()) continue;
    const bool is_cut = !trial.parts[i].placement.at(0).empty();
    if (is_cut && told == ToldBy::kParts)
      own.back() = PartTensor::wrap(
          own.back(), std::make_shared<const PartOf>(trial.wholes[i].sizes().vec(), trial.parts[i].placement));
    if (part.requires_grad()) own.back().requires_grad_();
    if (is_cut && told == ToldBy::kDeclared)
      pass.add(own.back(), {.placement = std::make_shared<const Placement>(trial.parts[i].placement)});
  }
  const std::vector<int64_t> calls{pass.group(0).counters().calls, pass.group(1).counters().calls};
  std::vector<at::Tensor> results = called(trial.op, with_tensors(trial.arguments, own));
  std::string much;
  if (undivided == Undivided::kMove) {
    const WithoutInterception unseen;
    for (int axis = 0; axis < 2 && much.empty(); ++axis)
      if (const int64_t made = pass.group(axis).counters().calls - calls[axis]; made > 0)
        much = gathers_much(pass, axis, made, trial, results);
  }
  if (results.size() != trial.truth.size()) return "another number of results";
  for (size_t i = 0; i < results.size(); ++i) {
    if (told == ToldBy::kParts && results[i].sizes() != trial.truth[i].sizes()) return str("sizes of part ", i);
    if (const auto known = pass.find(results[i]); known && known->is_cut())
      results[i] = pass.whole(placed_argument(results[i], known));
    if (results[i].sizes() != trial.truth[i].sizes())
      return str("sizes of result ", i, ": ", results[i].sizes(), " and not ", trial.truth[i].sizes());
    const WithoutInterception unseen;
    if (!at::allclose(results[i].to(at::kDouble), trial.truth[i].to(at::kDouble), 1e-9, 1e-9, /*equal_nan=*/true))
      return str("values of result ", i);
  }
  backward(results);
  const WithoutInterception unseen;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < own.size(); ++i) {
    if (!own[i].defined() || !trial.wholes[i].grad().defined()) continue;
    const Placement& placement = trial.parts[i].placement;
    // Where the tensor is whole along the axis of shares, these add up.
    const at::Tensor gradient = own[i].grad();
    at::Tensor found = gradient.defined() ? own_elements(gradient).clone() : at::zeros_like(own_elements(own[i]));
    if (!placement.is_cut_along(0)) pass.group(0).all_reduce(found).wait();
    at::Tensor expected = trial.wholes[i].grad();
    for (const Cut& cut : placement.at(pass.position()))
      expected = cut.slice(expected, axes().grid.rank(pass.position(), cut.axis));
    if (!at::allclose(found, expected * axes().grid.ranks(0), 1e-8, 1e-9, /*equal_nan=*/true))
      return str("gradient of argument ", i);
  }
  return much;
}

void expect_every_operator(ToldBy told, Undivided undivided = Undivided::kGather) {
  const QuietWarnings quiet;
  const int64_t trials = of_environment("TRIREME_PASS_TRIALS", 2), seed = of_environment("TRIREME_ROW_SEED", 1);
  std::vector<Trial> all;
  for (const NamedCase& named : operator_cases()) {
    Random random(seed);
    manual_seed(seed);
    for (int64_t i = 0; i < trials; ++i)
      if (const auto one = named.make(random, {}))
        if (auto trial = trial_of(*one, random)) all.push_back(*std::move(trial));
  }
  EXPECT_GT(all.size(), 800u);
  std::printf("%zu calls\n", all.size());
  run_ranks(axes().grid.positions(), [&](Rank& rank) {
    const QuietWarnings quiet_here;
    const std::vector<std::unique_ptr<Group>> groups = groups_of(rank.world());
    const std::unique_ptr<AxisPass> pass = pass_of(groups, undivided);
    if (told == ToldBy::kParts) pass->give_parts();
    std::map<std::string, int64_t> refused;
    int64_t refusals = 0;
    for (const Trial& trial : all) {
      std::string problem;
      try {
        problem = difference(*pass, trial, told, undivided);
      } catch (const StateError& error) {
        problem = error.what();
        if (undivided == Undivided::kMove && problem.find(" is a slice, that of rank ") != std::string::npos) {
          problem.clear();
          ++refusals;
          ++refused[trial.op.schema().name()];
        }
      } catch (const c10::Error& error) {
        problem = error.what_without_backtrace();
      } catch (const std::exception& error) {
        problem = error.what();
      }
      EXPECT_EQ(problem, "") << trial.text << " on rank " << rank.id();
      if (!problem.empty()) return;
    }
    if (undivided == Undivided::kGather || rank.id() != 0) return;
    for (const auto& [name, count] : refused) std::printf("%s %ld, ", name.c_str(), static_cast<long>(count));
    std::printf("%ld of %zu calls are refused\n", static_cast<long>(refusals), all.size());
    EXPECT_LT(refusals, static_cast<int64_t>(all.size()) / 8);
  });
}

// --- programs of several operators ---

/// A program of operators that libtorch users chain, drawn by a seed; each choice is by whole sizes alone.
class RandomProgram {
 public:
  explicit RandomProgram(int64_t seed) : random_(static_cast<uint64_t>(seed)) {}

  /// Its loss over `inputs`, all float64; the names of its operators are added to `text`.
  at::Tensor run(const std::vector<at::Tensor>& inputs, std::string& text) {
    weights_ = {inputs.begin() + 1, inputs.end()};
    pool_ = {inputs[0]};
    const int64_t steps = 4 + below(random_, 6);
    for (int64_t i = 0; i < steps; ++i) {
      const at::Tensor x = one_of(random_, pool_);
      const auto number = below(random_, static_cast<int64_t>(kSteps.size()));
      const at::Tensor made = (this->*kSteps[static_cast<size_t>(number)].second)(x);
      if (!made.defined() || made.numel() == 0 || made.numel() > 4000 || made.dim() == 0 || made.dim() > 4) continue;
      text += str(" ", kSteps[static_cast<size_t>(number)].first, made.sizes());
      pool_.push_back(made);
    }
    at::Tensor loss;
    for (size_t i = pool_.size() - std::min<size_t>(pool_.size(), 3); i < pool_.size(); ++i) {
      const at::Tensor term = (pool_[i] * weight_of(pool_[i])).sum();
      loss = loss.defined() ? loss + term : term;
    }
    return loss;
  }

 private:
  using Step = at::Tensor (RandomProgram::*)(const at::Tensor&);
  int64_t dim_of(const at::Tensor& x) { return below(random_, x.dim()); }
  /// Places along a dim, made by its length.
  at::Tensor places(const at::Tensor& x, int64_t dim) {
    std::vector<int64_t> sizes(static_cast<size_t>(x.dim()), 1);
    sizes[static_cast<size_t>(dim)] = x.size(dim);
    return at::arange(x.size(dim)).view(sizes);
  }

  at::Tensor linear(const at::Tensor& x) {
    for (const at::Tensor& weight : weights_)
      if (weight.size(1) == x.size(-1)) return at::linear(x, weight);
    return {};
  }
  at::Tensor each(const at::Tensor& x) {
    for (const at::Tensor& y : pool_)
      if (!y.is_same(x) && y.sizes() == x.sizes()) return x * y.sigmoid() + y;
    return at::gelu(x) + 0.5 * x;
  }
  at::Tensor softmax(const at::Tensor& x) { return at::softmax(x, dim_of(x)); }
  at::Tensor norm(const at::Tensor& x) { return x.size(-1) > 1 ? at::layer_norm(x, {x.size(-1)}) : at::Tensor(); }
  at::Tensor transpose(const at::Tensor& x) { return x.transpose(dim_of(x), dim_of(x)); }
  at::Tensor merge(const at::Tensor& x) {
    if (x.dim() < 2) return {};
    const int64_t dim = below(random_, x.dim() - 1);
    return x.flatten(dim, dim + 1);
  }
  at::Tensor split(const at::Tensor& x) {
    const int64_t dim = dim_of(x), by = 2 + below(random_, 2);
    return x.size(dim) % by == 0 ? x.unflatten(dim, {by, x.size(dim) / by}) : at::Tensor();
  }
  at::Tensor slice(const at::Tensor& x) {
    const int64_t dim = dim_of(x), begin = below(random_, x.size(dim));
    return x.slice(dim, begin, begin + 1 + below(random_, x.size(dim)), 1 + below(random_, 2));
  }
  at::Tensor cat(const at::Tensor& x) { return at::cat({x, x.tanh(), x.neg()}, dim_of(x)); }
  at::Tensor sum(const at::Tensor& x) { return x - x.mean(dim_of(x), true) + x.sum(dim_of(x), true) * 0.1; }
  at::Tensor largest(const at::Tensor& x) { return x + x.amax(dim_of(x), true) - std::get<0>(x.min(dim_of(x), true)); }
  at::Tensor scan(const at::Tensor& x) { return x.cumsum(dim_of(x)) * 0.3; }
  at::Tensor flip(const at::Tensor& x) { return x.flip({dim_of(x)}) + x; }
  at::Tensor roll(const at::Tensor& x) { return x.roll(1 + below(random_, 3), dim_of(x)) * x; }
  at::Tensor pairs(const at::Tensor& x) {
    return x.dim() >= 2 ? at::softmax(at::matmul(x, x.transpose(-1, -2)) * 0.3, -1).matmul(x) : at::Tensor();
  }
  at::Tensor masked(const at::Tensor& x) {
    const int64_t dim = dim_of(x), from = below(random_, x.size(dim));
    return at::where(places(x, dim) >= from, x, x * 0.2);
  }
  at::Tensor taken(const at::Tensor& x) {
    const int64_t dim = dim_of(x), size = x.size(dim);
    return x.index_select(dim, at::arange(1 + below(random_, size)).mul(3).remainder(size));
  }
  at::Tensor selected(const at::Tensor& x) { return x.select(0, below(random_, x.size(0))) * 2; }
  at::Tensor by_mask(const at::Tensor& x) {
    const at::Tensor mask = at::arange(x.size(0)).remainder(3).ne(below(random_, 3));
    return mask.any().item<bool>() ? at::index(x, {mask}) : at::Tensor();
  }
  at::Tensor expanded(const at::Tensor& x) {
    std::vector<int64_t> sizes(static_cast<size_t>(x.dim()) + 1, -1);
    sizes[0] = 2;
    return x.unsqueeze(0).expand(sizes) * 0.5;
  }
  at::Tensor sorted(const at::Tensor& x) { return std::get<0>(x.sort(dim_of(x))); }
  at::Tensor padded(const at::Tensor& x) { return at::pad(x, {1, below(random_, 2)}); }

  static const std::vector<std::pair<const char*, Step>> kSteps;
  Random random_;
  std::vector<at::Tensor> weights_, pool_;
};
const std::vector<std::pair<const char*, RandomProgram::Step>> RandomProgram::kSteps = {
    {"linear", &RandomProgram::linear},
    {"each", &RandomProgram::each},
    {"softmax", &RandomProgram::softmax},
    {"norm", &RandomProgram::norm},
    {"transpose", &RandomProgram::transpose},
    {"merge", &RandomProgram::merge},
    {"split", &RandomProgram::split},
    {"slice", &RandomProgram::slice},
    {"cat", &RandomProgram::cat},
    {"sum", &RandomProgram::sum},
    {"largest", &RandomProgram::largest},
    {"scan", &RandomProgram::scan},
    {"flip", &RandomProgram::flip},
    {"roll", &RandomProgram::roll},
    {"pairs", &RandomProgram::pairs},
    {"masked", &RandomProgram::masked},
    {"taken", &RandomProgram::taken},
    {"selected", &RandomProgram::selected},
    {"by_mask", &RandomProgram::by_mask},
    {"expanded", &RandomProgram::expanded},
    {"sorted", &RandomProgram::sorted},
    {"padded", &RandomProgram::padded}};

/// The axes of programs, and the way of each where nothing can be divided.
struct ProgramAxes {
  Axes axes;
  std::vector<Undivided> undivided;

  bool may_refuse() const { return std::ranges::count(undivided, Undivided::kMove) > 0; }
  /// Ranks that count the loss, each once.
  int64_t counting() const {
    int64_t count = 1;
    for (int axis = 0; axis < axes.grid.axes(); ++axis)
      if (axes.laws[axis] == GradientLaw::kShares) count *= axes.grid.ranks(axis);
    return count;
  }
};

/// The inputs of a program and how ranks have them.
struct Inputs {
  std::vector<at::Tensor> wholes;
  std::vector<Parts> parts;
  at::Tensor loss;
  std::string text;
};

Inputs inputs_of(int64_t seed, const Axes& axes) {
  Random random(static_cast<uint64_t>(seed) * 7919 + 1);
  const at::Generator generator = at::detail::createCPUGenerator(static_cast<uint64_t>(seed));
  Inputs made;
  for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{4, 6, 12}, {12, 12}, {6, 12}, {12, 6}}) {
    made.wholes.push_back(at::randn(sizes, generator, at::kDouble).requires_grad_());
    made.parts.push_back(distributed(made.wholes.back(), random_placement(random, sizes, axes.grid), axes));
  }
  made.loss = RandomProgram(seed).run(made.wholes, made.text);
  torch::autograd::backward({made.loss}, {});
  return made;
}

/// The difference of this rank from one process; "": none.
std::string difference_of(AxisPass& pass, int64_t seed, const Inputs& inputs, const ProgramAxes& of) {
  std::vector<at::Tensor> own;
  for (size_t i = 0; i < inputs.parts.size(); ++i) {
    own.push_back(inputs.parts[i].local[pass.position()].detach().clone());
    if (!inputs.parts[i].placement.at(0).empty())
      own.back() = PartTensor::wrap(
          own.back(), std::make_shared<const PartOf>(inputs.wholes[i].sizes().vec(), inputs.parts[i].placement));
    own.back().requires_grad_();
  }
  std::string text;
  const at::Tensor loss = RandomProgram(seed).run(own, text);
  if (text != inputs.text) return "other sizes: " + text;
  torch::autograd::backward({loss}, {});
  const WithoutInterception unseen;
  const at::NoGradGuard no_grad;
  if (!at::allclose(loss, inputs.loss, 1e-7, 1e-7)) return str("a loss of ", loss.item<double>());
  for (size_t i = 0; i < own.size(); ++i) {
    const Placement& placement = inputs.parts[i].placement;
    const at::Tensor gradient = own[i].grad();
    at::Tensor found = gradient.defined() ? own_elements(gradient).clone() : at::zeros_like(own_elements(own[i]));
    for (int axis = 0; axis < pass.grid().axes(); ++axis)
      if (of.axes.laws[axis] == GradientLaw::kShares && !placement.is_cut_along(axis))
        pass.group(axis).all_reduce(found).wait();
    const at::Tensor& whole = inputs.wholes[i].grad();
    at::Tensor expected = whole.defined() ? whole : at::zeros_like(inputs.wholes[i]);
    for (const Cut& cut : placement.at(pass.position()))
      expected = cut.slice(expected, pass.grid().rank(pass.position(), cut.axis));
    if (!at::allclose(found, expected * of.counting(), 1e-6, 1e-7)) return str("gradient of input ", i);
  }
  return "";
}

/// Programs on parts have the loss and the gradients of one process, or are refused on every rank. Of
/// TRIREME_PASS_PROGRAMS, `programs` without it.
void expect_programs(const ProgramAxes& of, int64_t programs, double most_refused) {
  programs = of_environment("TRIREME_PASS_PROGRAMS", programs);
  const int64_t seed = of_environment("TRIREME_ROW_SEED", 1);
  std::vector<Inputs> all;
  for (int64_t i = 0; i < programs; ++i) all.push_back(inputs_of(seed * 100'000 + i, of.axes));
  std::atomic<int64_t> refused = 0;
  run_ranks(of.axes.grid.positions(), [&](Rank& rank) {
    const QuietWarnings quiet;
    const std::vector<std::unique_ptr<Group>> groups = groups_of(rank.world(), of.axes.grid);
    const std::unique_ptr<AxisPass> pass = pass_of(groups, of.axes.laws, of.undivided);
    pass->give_parts();
    for (int64_t i = 0; i < programs; ++i) {
      const Inputs& inputs = all[static_cast<size_t>(i)];
      std::string problem;
      try {
        problem = difference_of(*pass, seed * 100'000 + i, inputs, of);
      } catch (const StateError& error) {
        problem = error.what();
        if (of.may_refuse() && problem.find(" is a slice, that of rank ") != std::string::npos) {
          problem.clear();
          ++refused;
        }
      } catch (const std::exception& error) {
        problem = error.what();
      }
      EXPECT_EQ(problem, "") << "program " << i << ":" << inputs.text << " on rank " << rank.id();
      if (!problem.empty()) return;
    }
  });
  EXPECT_EQ(refused % of.axes.grid.positions(), 0);
  const auto count = refused / of.axes.grid.positions();
  std::printf("%ld of %ld programs are refused\n", static_cast<long>(count), static_cast<long>(programs));
  EXPECT_LE(static_cast<double>(count), most_refused * static_cast<double>(programs));
}

/// A whole, a share and a whole, as layers, sequences and layers cut.
Axes three_axes() {
  using enum GradientLaw;
  return {AxisGrid({2, 2, 2}), {kWhole, kShares, kWhole}};
}

TEST(AxisPass, RunsProgramsOnPartsOverTwoAxes) {
  expect_programs({axes(), {Undivided::kGather, Undivided::kGather}}, 60, 0);
}
TEST(AxisPass, MovesInProgramsOnPartsOverTwoAxes) {
  expect_programs({axes(), {Undivided::kMove, Undivided::kMove}}, 60, 0.7);
}
TEST(AxisPass, RunsProgramsOnPartsOverThreeAxes) {
  expect_programs({three_axes(), {Undivided::kGather, Undivided::kGather, Undivided::kGather}}, 20, 0);
}
TEST(AxisPass, MovesInProgramsOnPartsOverThreeAxes) {
  expect_programs({three_axes(), {Undivided::kMove, Undivided::kMove, Undivided::kMove}}, 20, 0.7);
}
TEST(AxisPass, MovesAlongOneOfThreeAxesInPrograms) {
  expect_programs({three_axes(), {Undivided::kGather, Undivided::kMove, Undivided::kGather}}, 20, 0.7);
}

TEST(AxisPass, MovesOrRefusesWhatItMayNotGather) { expect_every_operator(ToldBy::kDeclared, Undivided::kMove); }
TEST(AxisPass, MovesOrRefusesPartsThatItMayNotGather) { expect_every_operator(ToldBy::kParts, Undivided::kMove); }
TEST(AxisPass, RunsEveryOperatorOfTheTableOverTwoAxes) { expect_every_operator(ToldBy::kDeclared); }
TEST(AxisPass, RunsEveryOperatorOnPartsOverTwoAxes) { expect_every_operator(ToldBy::kParts); }

/// A tensor of 4 x 6 elements whose dim `dim_of[axis]` the axis cuts evenly; -1: none.
std::shared_ptr<const Placement> placed_evenly(const std::vector<int64_t>& dim_of) {
  const AxisGrid& grid = axes().grid;
  auto made = std::make_shared<Placement>(grid.positions());
  for (int position = 0; position < grid.positions(); ++position)
    for (int axis = 0; axis < grid.axes(); ++axis)
      if (dim_of[axis] >= 0)
        made->at(position).push_back(
            {axis, dim_of[axis], 1,
             std::make_shared<const Ranges>(Ranges::even(dim_of[axis] == 0 ? 4 : 6, grid.ranks(axis)))});
  return made;
}

at::Tensor cut_for(AxisPass& pass, const std::vector<int64_t>& dim_of, bool is_parameter = false) {
  const auto placement = placed_evenly(dim_of);
  at::Tensor part = at::arange(24, at::kDouble).view({4, 6});
  for (const Cut& cut : placement->at(pass.position()))
    part = cut.slice(part, axes().grid.rank(pass.position(), cut.axis));
  part = part.clone();
  pass.add(part, {.placement = placement, .is_parameter = is_parameter});
  return part;
}

void on_every_rank(const std::function<void(AxisPass&)>& body, Undivided undivided = Undivided::kGather) {
  run_ranks(axes().grid.positions(), [&](Rank& rank) {
    const std::vector<std::unique_ptr<Group>> groups = groups_of(rank.world());
    body(*pass_of(groups, undivided));
  });
}

/// An element of a dim that one axis cuts is added up over its ranks, and stays cut by the other one: a program may
/// read it, and would write into a copy.
TEST(AxisPass, RefusesWritesIntoACopyThatIsCut) {
  for (const bool gives_parts : {false, true})
    on_every_rank([&](AxisPass& pass) {
      if (gives_parts) pass.give_parts();
      const at::Tensor column = cut_for(pass, {0, 1}).select(1, 2);
      EXPECT_EQ(own_elements(column).size(0), 2) << "still cut by the first axis";
      EXPECT_NE(error_of([&] { column.fill_(0); }).find("writes into a copy of other ranks' elements"),
                std::string::npos);
    });
}

/// Products of activations and of what is computed from a parameter alone keep the parameter's cut, though the
/// activations have more elements.
TEST(AxisPass, LetsParametersLeadAlsoThroughTheirViews) {
  for (const bool gives_parts : {false, true})
    on_every_rank([&](AxisPass& pass) {
      if (gives_parts) pass.give_parts();
      const at::Tensor weight = cut_for(pass, {-1, 1}, /*is_parameter=*/true);   // [k, n], n cut
      const at::Tensor rows = cut_for(pass, {-1, 1}).t().repeat({4, 1}).mul(1);  // [m, k], m cut
      const at::Tensor product = at::matmul(rows, weight.t().t());
      EXPECT_EQ(own_elements(product).sizes(), (std::vector<int64_t>{24, 2}));
      const at::Tensor of_activations = at::matmul(rows, cut_for(pass, {-1, 1}));
      EXPECT_EQ(own_elements(of_activations).sizes(), (std::vector<int64_t>{8, 6}));
    });
}

/// Elements that several ranks have count once, and equal extremes share a gradient as on one rank.
TEST(AxisPass, CountsEachElementOnce) {
  on_every_rank([&](AxisPass& pass) {
    const auto overlapping =
        std::make_shared<const Ranges>(6, std::vector<std::vector<Interval>>{{{0, 3}}, {{2, 5}}, {{4, 6}}});
    auto placement = std::make_shared<Placement>(axes().grid.positions());
    for (int position = 0; position < axes().grid.positions(); ++position)
      placement->at(position).push_back({1, 1, 1, overlapping});
    const at::Tensor whole = at::arange(24, at::kDouble).view({4, 6});
    const at::Tensor part = placement->at(pass.position())[0].slice(whole, pass.group(1).rank()).clone();
    pass.add(part, {.placement = placement});
    const at::Tensor rows = part.sum(1), products = at::matmul(part, whole.t().contiguous());
    {
      const WithoutInterception unseen;
      EXPECT_TRUE(at::allclose(rows, whole.sum(1)));
      EXPECT_TRUE(at::allclose(products, at::matmul(whole, whole.t())));
    }
  });
}

TEST(AxisPass, SharesAGradientAmongEqualExtremes) {
  for (const Undivided undivided : {Undivided::kGather, Undivided::kMove})
    on_every_rank(
        [&](AxisPass& pass) {
          const auto placement = placed_evenly({-1, 1});
          at::Tensor whole = at::zeros({4, 6}, at::kDouble);
          whole.select(1, 0).fill_(1);  // of rank 0 one, of rank 1 two, of rank 2 none
          whole.narrow(1, 2, 2).fill_(1);
          const at::Tensor part = placement->at(pass.position())[0].slice(whole, pass.group(1).rank()).clone();
          for (const bool of_all : {false, true}) {
            const at::Tensor leaf = part.detach().clone().requires_grad_();
            pass.add(leaf, {.placement = placement});
            const at::Tensor largest = of_all ? leaf.max() : leaf.amax(1).sum();
            largest.backward();
            const WithoutInterception unseen;
            EXPECT_EQ(largest.item<double>(), of_all ? 1 : 4);
            EXPECT_TRUE(at::allclose(leaf.grad(), leaf.detach() / (of_all ? 12 : 3)));
          }
        },
        undivided);
}

/// Where libtorch has no value to count, ranks have none: one part of a mean of infinite extremes is not a number.
TEST(AxisPass, GivesInfiniteExtremesAsTheyAre) {
  on_every_rank(
      [&](AxisPass& pass) {
        const auto placement = placed_evenly({-1, 1});
        at::Tensor part = at::zeros({4, 2}, at::kDouble);
        if (pass.group(1).rank() == 1) part.select(1, 0).fill_(INFINITY);
        part.requires_grad_();
        pass.add(part, {.placement = placement});
        const at::Tensor largest = part.amax(1);
        largest.sum().backward();
        const WithoutInterception unseen;
        EXPECT_TRUE(largest.isinf().all().item<bool>());
        EXPECT_EQ(part.grad().sum().item<double>(), pass.group(1).rank() == 1 ? 4 : 0);
      },
      Undivided::kMove);
}

/// A refusal names operator, dim, sizes, axis and rank.
TEST(AxisPass, RefusesToGatherByName) {
  on_every_rank(
      [&](AxisPass& pass) {
        const at::Tensor rows = cut_for(pass, {-1, 1});
        const at::Tensor row = rows.sum(0);
        const std::string sorted = error_of([&] { row.sort(); });
        EXPECT_NE(sorted.find("aten::sort sorts along dim 0 of [6], which a test cuts: [2] is a slice, that of rank "),
                  std::string::npos)
            << sorted;
        EXPECT_NE(sorted.find("of group 'axis 1'; use it along another dim, or with at least 3 samples"),
                  std::string::npos)
            << sorted;
        const std::string unknown = error_of([&] { rows.cov(); });
        EXPECT_NE(unknown.find("aten::cov needs whole tensors, and a test cuts dim 1 of [4, 6]"), std::string::npos)
            << unknown;
      },
      Undivided::kMove);
}

/// Tokens move to rows for a softmax and come back, and the operators of one that is opened are looked at one by one.
TEST(AxisPass, MovesTokensToRowsAndBack) {
  for (const bool gives_parts : {false, true})
    on_every_rank(
        [&](AxisPass& pass) {
          if (gives_parts) pass.give_parts();
          const at::Tensor part = cut_for(pass, {-1, 1});
          const int64_t before = pass.group(1).counters().calls;
          const at::Tensor shares = part.softmax(1);
          EXPECT_EQ(pass.group(1).counters().calls - before, 2) << "there and back";
          EXPECT_EQ(*pass.find(shares)->placement, *placed_evenly({-1, 1}));
          const WithoutInterception unseen;
          const at::Tensor whole = at::arange(24, at::kDouble).view({4, 6}).softmax(1);
          EXPECT_TRUE(at::allclose(own_elements(shares), whole.narrow(1, 2 * pass.group(1).rank(), 2)));
        },
        Undivided::kMove);
}

}  // namespace
}  // namespace trireme::testing
