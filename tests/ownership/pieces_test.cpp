#include "ownership/pieces.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/count_of.h"
#include "tests/support/error_of.h"
#include "tests/support/live_bytes.h"
#include "trireme/base/error.h"

namespace trireme::ownership {
namespace {

using testing::LiveBytes;
using Tensors = std::vector<at::Tensor>;
using Function = std::function<at::Tensor(const Tensors&)>;

// --- programs ---

/// A program whose parameters and operators have homes, as every stage and one process see it. Tensors are numbers.
class Program {
 public:
  enum class Kind { kInput, kCompute, kView, kWrite, kRoot };
  struct Operator {
    Kind kind;
    int home;  ///< of a computation; views and writes are their first argument's
    Function function;
    std::vector<int> arguments;
    bool has_gradients = true;
  };

  int parameter(int home, at::IntArrayRef sizes = {4, 4}) {
    parameters.push_back({home, sizes.vec()});
    return tensors++;
  }
  /// A tensor that every stage has, another in each micro-batch.
  int input(at::IntArrayRef sizes = {4, 4}) {
    const auto numbers = [sizes = sizes.vec()](const Tensors&) { return at::empty(sizes, at::kDouble); };
    operators.push_back({Kind::kInput, -1, numbers, {}});
    return tensors++;
  }
  int compute(int home, std::vector<int> arguments, Function function) {
    operators.push_back({Kind::kCompute, home, std::move(function), std::move(arguments), has_gradients});
    return tensors++;
  }
  int view(int of, std::function<at::Tensor(const at::Tensor&)> function) {
    operators.push_back(
        {Kind::kView, -1, [function](const Tensors& t) { return function(t[0]); }, {of}, has_gradients});
    return tensors++;
  }
  /// Arguments: the written one, then those that it is written from.
  void write(std::vector<int> arguments, Function function) {
    operators.push_back({Kind::kWrite, -1, std::move(function), std::move(arguments), has_gradients});
  }
  void root(int loss) { operators.push_back({Kind::kRoot, -1, {}, {loss}}); }

  /// A line for each operator: kind, home, arguments.
  std::string text() const {
    std::string text;
    int result = static_cast<int>(parameters.size());
    for (const Operator& op : operators) {
      const bool has_result = op.kind == Kind::kInput || op.kind == Kind::kCompute || op.kind == Kind::kView;
      text += str(has_result ? str(result++, " = ") : "",
                  std::vector{"input", "compute", "view", "write", "root"}[static_cast<int>(op.kind)], " ");
      if (op.kind == Kind::kCompute) text += str("on ", op.home, " ");
      for (const int argument : op.arguments) text += str(argument, " ");
      text += op.has_gradients ? "\n" : "without gradients\n";
    }
    return text;
  }

  // Short forms. They save copies for backward, so that what they use may be written afterwards.
  int mm(int home, int x, int w) {
    return compute(home, {x, w}, [](const Tensors& t) { return at::mm(t[0].clone(), t[1].clone()); });
  }
  int add(int home, int x, int y) {
    return compute(home, {x, y}, [](const Tensors& t) { return at::add(t[0], t[1]); });
  }
  int mul(int home, int x, int y) {
    return compute(home, {x, y}, [](const Tensors& t) { return at::mul(t[0].clone(), t[1].clone()); });
  }
  int tanh(int home, int x) {
    return compute(home, {x}, [](const Tensors& t) { return at::tanh(t[0]); });
  }
  void loss(int home, int x) {
    root(compute(home, {x}, [](const Tensors& t) { return at::sin(t[0]).sum(); }));
  }

  struct Parameter {
    int home;
    std::vector<int64_t> sizes;
  };
  std::vector<Parameter> parameters;  ///< the first tensors
  std::vector<Operator> operators;
  int tensors = 0;
  bool has_gradients = true;  ///< of the operators that are added next
};

struct Outcome {
  Tensors losses, gradients;
  std::vector<int> accumulations;  ///< of each parameter's gradient
  std::vector<int> pieces;         ///< of each stage, in the last micro-batch
  int transfers = 0;               ///< of gradients, in all micro-batches
  /// A view was used whose memory had been written: its node is made anew then, of its base, whose uses may be with
  /// another stage or piece. So sums may have another order.
  bool may_round_otherwise = false;
};

/// The parameters of a program, whose accumulations are counted.
class Parameters {
 public:
  explicit Parameters(const Program& program) : counts_(program.parameters.size()) {
    at::Generator generator = at::detail::createCPUGenerator(17);
    for (const Program::Parameter& parameter : program.parameters) {
      tensors.push_back(at::randn(parameter.sizes, generator, at::kDouble).requires_grad_());
      accumulators_.push_back(torch::autograd::impl::grad_accumulator(tensors.back()));
      accumulators_.back()->add_post_hook(std::make_unique<Counter>(counts_[accumulators_.size() - 1]));
    }
  }
  void finish(Outcome& outcome) const {
    for (const at::Tensor& tensor : tensors) outcome.gradients.push_back(tensor.grad());
    outcome.accumulations = counts_;
  }
  Tensors tensors;

 private:
  struct Counter final : torch::autograd::FunctionPostHook {
    explicit Counter(int& count) : count(count) {}
    Tensors operator()(const Tensors& outputs, const Tensors&) override {
      ++count;
      return outputs;
    }
    int& count;
  };
  std::vector<int> counts_;
  std::vector<NodePtr> accumulators_;
};

/// The numbers of a micro-batch's inputs.
class Inputs {
 public:
  explicit Inputs(int micro_batch) : generator_(at::detail::createCPUGenerator(23 + micro_batch)) {}
  at::Tensor next(const Program::Operator& op) { return op.function({}).normal_(0, 1, generator_); }

 private:
  at::Generator generator_;
};

/// In one process, without pieces.
Outcome run_plainly(const Program& program, int micro_batches) {
  Outcome outcome;
  const Parameters parameters(program);
  for (int m = 0; m < micro_batches; ++m) {
    Tensors tensors = parameters.tensors;
    Tensors roots;
    Inputs inputs(m);
    for (const Program::Operator& op : program.operators) {
      const at::AutoGradMode mode(op.has_gradients);
      Tensors arguments;
      for (const int argument : op.arguments) arguments.push_back(tensors[argument]);
      if (op.kind == Program::Kind::kRoot) {
        roots.push_back(arguments[0]);
        outcome.losses.push_back(arguments[0].detach().clone());
        continue;
      }
      const at::Tensor result = op.kind == Program::Kind::kInput ? inputs.next(op) : op.function(arguments);
      if (op.kind != Program::Kind::kWrite) tensors.push_back(result);
    }
    torch::autograd::backward(roots, {});
  }
  parameters.finish(outcome);
  return outcome;
}

// --- stages ---

/// Whether the node of a view is to be made anew.
bool is_outdated(const at::Tensor& tensor) {
  return tensor.is_view() &&
         torch::autograd::impl::get_view_autograd_meta(tensor)->get_attr_version() != tensor._version();
}

/// To which stage the gradient of a stage's uses of a tensor goes.
enum class Goes { kToTheStageThatUsedItBefore, kHome };

/// One micro-batch on all stages, operator by operator, each with its own Pieces. What a wire would carry is cloned.
class StagedMicroBatch {
 public:
  StagedMicroBatch(const Program& program, int stages, Goes gradient, Outcome& outcome)
      : program_(program), gradient_(gradient), outcome_(outcome), pieces_(stages), arrived_(stages) {}

  void forward(const Tensors& parameters, Inputs inputs) {
    for (size_t i = 0; i < parameters.size(); ++i) add(parameters[i], program_.parameters[i].home);
    for (const Program::Operator& op : program_.operators) {
      const at::AutoGradMode mode(op.has_gradients);
      if (op.kind == Program::Kind::kInput)
        add(inputs.next(op), kEverywhere);
      else
        run(op);
    }
    values_.clear();
  }

  /// Backward of all stages' pieces, each as soon as its gradients are there.
  void backward() {
    std::vector<int> left;
    for (const Pieces& pieces : pieces_) left.push_back(pieces.count());
    outcome_.pieces = left;
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (size_t stage = 0; stage < pieces_.size(); ++stage)
        while (left[stage] > 0 && is_ready(stage, left[stage] - 1)) {
          run_piece(stage, --left[stage]);
          goes_on = true;
        }
    }
    EXPECT_EQ(left, std::vector<int>(left.size())) << "stages wait for each other";
  }

 private:
  static constexpr int kEverywhere = -1;
  struct Value {
    at::Tensor own;  ///< at home
    int home;
    int base;                        ///< of a view, else itself
    int holder;                      ///< the stage that used it last
    std::map<int, at::Tensor> at;    ///< what a stage uses it as, of its latest run
    std::map<int, at::Tensor> data;  ///< what a stage has received
    int64_t version;
  };

  void add(const at::Tensor& own, int home, int base = -1) {
    const int index = static_cast<int>(values_.size());
    values_.push_back({own, home, base < 0 ? index : base, home, {{home, own}}, {}, own._version()});
  }

  /// Value `index` as an operator of the stage `home` is given it.
  at::Tensor bring(int index, int home) {
    Value& value = values_[index];
    if (value.home == kEverywhere) return value.own;
    if (is_outdated(value.own) && (values_[value.base].holder != value.home || pieces_[value.home].count() > 1))
      outcome_.may_round_otherwise = true;
    if (std::exchange(value.version, value.own._version()) != value.own._version()) {
      outcome_.may_round_otherwise |= value.holder != value.home;
      value.holder = value.home;
      value.at = {{value.home, value.own}};
      value.data.clear();
    }
    const bool is_away = home != value.home;
    if (is_away && !value.data.contains(home)) {
      pieces_[value.home].note_sent();
      pieces_[home].begin_receive();
      value.data[home] = value.own.detach().clone();
    }
    if (!at::GradMode::is_enabled() || !value.own.requires_grad()) return is_away ? value.data[home] : value.own;
    const int before = std::exchange(value.holder, home);
    const int to = gradient_ == Goes::kHome ? value.home : before;
    if (before == home || to == home) return value.at[home];
    const int64_t number = numbers_[{to, home}]++;
    pieces_[to].sent(value.at[to], {home, number});
    if (is_away)
      value.at[home] = pieces_[home].received(value.data[home], {to, number});
    else
      pieces_[home].received_back(value.own, {to, number});
    return value.at[home];
  }

  void run(const Program::Operator& op) {
    const int first = op.arguments[0];
    const int home = op.kind == Program::Kind::kCompute ? op.home : values_[first].home;
    Pieces& pieces = pieces_[home];
    const at::Tensor own = values_[first].own;
    if (op.kind == Program::Kind::kRoot) {
      outcome_.losses.push_back(own.detach().clone());
      return pieces.root(own, at::ones_like(own));
    }
    const bool writes = op.kind == Program::Kind::kWrite;
    if (writes) bring(values_[first].base, home);
    Tensors arguments;
    for (size_t i = 0; i < op.arguments.size(); ++i)
      arguments.push_back(i == 0 && writes ? own : bring(op.arguments[i], home));
    for (size_t i = writes; i < arguments.size(); ++i) arguments[i] = pieces.cross(arguments[i]);
    if (writes) pieces.begin_write(own);
    at::Tensor result = op.function(arguments);
    if (op.kind == Program::Kind::kView && !arguments[0].is_same(own)) {
      const at::Tensor of_stand_in = std::exchange(result, op.function({own}));
      pieces.made_view(result, of_stand_in);
    }
    if (!writes) add(result, home, op.kind == Program::Kind::kView && result.is_view() ? values_[first].base : -1);
  }

  bool is_ready(size_t stage, int piece) const {
    for (const TransferId& id : pieces_[stage].wanted(piece))
      if (!arrived_[stage].contains(id)) return false;
    return true;
  }

  void run_piece(size_t stage, int piece) {
    Pieces& pieces = pieces_[stage];
    for (const TransferId& id : pieces.wanted(piece)) pieces.put(id, arrived_[stage].extract(id).mapped());
    const Pieces::Roots roots = pieces.roots(piece);
    if (!roots.edges.empty())
      torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, false, false, true);
    for (auto& [id, gradient] : pieces.take_gradients(piece)) {
      ++outcome_.transfers;
      arrived_[id.stage][{static_cast<int>(stage), id.number}] = gradient.defined() ? gradient.clone() : gradient;
    }
  }

  const Program& program_;
  const Goes gradient_;
  Outcome& outcome_;
  std::vector<Pieces> pieces_;
  std::vector<std::map<TransferId, at::Tensor>> arrived_;
  std::vector<Value> values_;
  std::map<std::pair<int, int>, int64_t> numbers_;
};

struct Run {
  int micro_batches = 2;
  int open = 2;  ///< micro-batches whose forward runs before the first of them runs backward
  Goes gradient = Goes::kToTheStageThatUsedItBefore;
  bool may_round_otherwise = false;
};

Outcome run_staged(const Program& program, int stages, const Run& run) {
  Outcome outcome;
  outcome.may_round_otherwise = run.may_round_otherwise;
  const Parameters parameters(program);
  std::vector<StagedMicroBatch> batches;
  for (int m = 0; m < run.micro_batches; ++m) batches.emplace_back(program, stages, run.gradient, outcome);
  for (int m = 0; m < run.micro_batches + run.open - 1; ++m) {
    if (m < run.micro_batches) batches[m].forward(parameters.tensors, Inputs(m));
    if (m - run.open + 1 >= 0) batches[m - run.open + 1].backward();
  }
  parameters.finish(outcome);
  return outcome;
}

bool is_same(const at::Tensor& a, const at::Tensor& b, bool may_round_otherwise) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  return may_round_otherwise ? at::allclose(a, b, 1e-9, 1e-9) : at::equal(a, b);
}

/// Trains on `stages` stages as one process does, bit by bit.
Outcome expect_same(const Program& program, int stages, const Run& run = {}) {
  const Outcome plain = run_plainly(program, run.micro_batches);
  Outcome staged = run_staged(program, stages, run);
  EXPECT_EQ(plain.losses.size(), staged.losses.size());
  for (size_t i = 0; i < std::min(plain.losses.size(), staged.losses.size()); ++i)
    EXPECT_TRUE(is_same(plain.losses[i], staged.losses[i], false)) << "loss " << i;
  EXPECT_EQ(plain.accumulations, staged.accumulations);
  for (size_t i = 0; i < plain.gradients.size(); ++i)
    EXPECT_TRUE(is_same(plain.gradients[i], staged.gradients[i], staged.may_round_otherwise))
        << "gradient of parameter " << i << "\n"
        << (plain.gradients[i].defined() && staged.gradients[i].defined() ? plain.gradients[i] - staged.gradients[i]
                                                                          : at::Tensor());
  return staged;
}

// --- what flows ---

TEST(Pieces, AStraightLineIsOnePieceOnEachStage) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1), w2 = p.parameter(2);
  p.loss(2, p.mm(2, p.tanh(1, p.mm(1, p.mm(0, p.input(), w0), w1)), w2));
  const Outcome outcome = expect_same(p, 3);
  EXPECT_EQ(outcome.pieces, (std::vector<int>{1, 1, 1}));
  EXPECT_EQ(outcome.transfers, 2 * 2);
}

TEST(Pieces, AReturnToAStageBeginsASecondPiece) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1), head = p.parameter(0);
  p.loss(0, p.mm(0, p.tanh(1, p.mm(1, p.mm(0, p.input(), w0), w1)), head));
  EXPECT_EQ(expect_same(p, 2).pieces, (std::vector<int>{2, 1}));
}

TEST(Pieces, ATiedParameterGetsItsGradientsInOneSum) {
  Program p;
  const int tied = p.parameter(0), w1 = p.parameter(1);
  const int x = p.mm(1, p.mm(0, p.input(), tied), w1);
  const int y = p.mm(0, x, tied);
  const int z = p.mm(1, p.mul(0, y, tied), w1);
  p.loss(0, p.mm(0, p.mm(0, z, tied), tied));
  EXPECT_EQ(expect_same(p, 2).pieces, (std::vector<int>{3, 2}));
}

TEST(Pieces, SkipsOfThreeUsesOnAPathThereAndBackHaveTheBitsOfOneProcess) {
  Program p;
  std::vector<int> w;
  for (int stage = 0; stage < 3; ++stage) w.push_back(p.parameter(stage));
  const int x = p.mm(0, p.input(), w[0]);
  const int a = p.mm(0, x, w[0]);
  const int b = p.mm(1, p.add(1, a, x), w[1]);
  const int c = p.mm(2, p.mul(2, b, x), w[2]);
  const int d = p.mm(1, p.add(1, p.mul(1, c, b), x), w[1]);
  p.loss(0, p.mm(0, p.add(0, p.mul(0, d, a), x), w[0]));
  EXPECT_EQ(expect_same(p, 3).pieces, (std::vector<int>{2, 2, 1}));
}

TEST(Pieces, ManyUsesOnEachOfTwoLaterStagesAreAddedInTheOrderOfOneProcess) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1), w2 = p.parameter(2);
  const int encoded = p.mm(0, p.input(), w0);
  int x = p.mm(1, encoded, w1);
  for (int i = 0; i < 3; ++i) x = p.tanh(1, p.mul(1, x, encoded));
  x = p.mm(2, x, w2);
  for (int i = 0; i < 3; ++i) x = p.tanh(2, p.mul(2, x, encoded));
  p.loss(2, x);
  EXPECT_EQ(expect_same(p, 3).pieces, (std::vector<int>{1, 1, 1}));
}

TEST(Pieces, ManyUsesElsewhereAndAtHomeAgainAreAddedInTheOrderOfOneProcess) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1);
  const int x = p.mm(0, p.input(), w0);
  int y = p.mm(0, x, w0);
  for (const int home : {1, 0, 1, 0})
    for (int i = 0; i < 3; ++i) y = p.tanh(home, p.mul(home, y, x));
  p.loss(1, p.mm(1, y, w1));
  EXPECT_EQ(expect_same(p, 2).pieces, (std::vector<int>{3, 3}));
}

TEST(Pieces, ViewsOfALaterPieceAreAddedInTheOrderOfOneProcess) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1);
  const int x = p.mm(0, p.input(), w0);
  int y = p.mm(1, p.mul(1, p.mm(1, x, w1), x), x);
  for (int i = 0; i < 3; ++i) {
    y = p.mul(0, p.mul(0, y, x), p.view(x, [](const at::Tensor& t) { return t.t(); }));
    y = p.mul(0, y,
              p.view(p.view(x, [](const at::Tensor& t) { return t.t(); }), [](const at::Tensor& t) { return t[1]; }));
  }
  p.loss(1, p.mm(1, y, w1));
  expect_same(p, 2);
}

TEST(Pieces, AParameterTravels) {
  Program p;
  const int scale = p.parameter(0, {4}), w1 = p.parameter(1), w0 = p.parameter(0);
  const int x = p.mul(1, p.mm(1, p.mul(0, w0, scale), w1), scale);
  p.loss(0, p.mul(0, x, scale));
  expect_same(p, 2);
}

TEST(Pieces, AParameterThatTravelsFirstAndIsUsedAtHomeLater) {
  Program p;
  const int scale = p.parameter(0, {4}), w1 = p.parameter(1);
  p.loss(0, p.mul(0, p.mul(1, w1, scale), scale));
  expect_same(p, 2);
}

TEST(Pieces, WhatIsSentAndNotUsedHasNoGradient) {
  Program p;
  const int w0 = p.parameter(0), v0 = p.parameter(0), w1 = p.parameter(1);
  const int x = p.mm(0, p.input(), w0);
  p.mm(1, p.mm(0, p.input(), v0), w1);
  p.loss(1, p.mm(1, x, w1));
  const Outcome outcome = expect_same(p, 2);
  EXPECT_FALSE(outcome.gradients[1].defined());
}

TEST(Pieces, DetachedValuesCarryNoGradients) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1);
  const int x = p.mm(0, p.input(), w0);
  const int y = p.mm(1, p.view(x, [](const at::Tensor& t) { return t.detach(); }), w1);
  p.loss(0, p.mul(0, y, x));
  EXPECT_EQ(expect_same(p, 2).transfers, 2 * 1);
}

TEST(Pieces, WithoutGradientsNothingIsKept) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1);
  p.has_gradients = false;
  const int x = p.mm(0, p.mm(1, p.mm(0, p.input(), w0), w1), w0);
  p.has_gradients = true;
  p.loss(1, p.mul(1, x, w1));
  EXPECT_EQ(expect_same(p, 2).transfers, 0);
}

TEST(Pieces, SeveralRootsAndOneThatIsNamedTwice) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1);
  const int x = p.mm(0, p.input(), w0);
  const int early = p.compute(0, {x}, [](const Tensors& t) { return t[0].sum(); });
  const int late = p.compute(0, {p.mm(1, x, w1), w0}, [](const Tensors& t) { return at::mul(t[0], t[1]).sum(); });
  p.root(late);
  p.root(early);
  p.root(late);
  expect_same(p, 2);
}

TEST(Pieces, ARootIsUsedByALaterPieceToo) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1);
  const int early = p.compute(0, {p.mm(0, p.input(), w0)}, [](const Tensors& t) { return t[0].sum(); });
  int x = p.mul(1, early, w1);
  for (int i = 0; i < 3; ++i) x = p.tanh(0, p.mul(0, x, early));
  p.root(p.compute(0, {x}, [](const Tensors& t) { return t[0].sum(); }));
  p.root(early);
  expect_same(p, 2);
}

TEST(Pieces, UsesBeforeAndAfterATransferOfTheSamePieceAreAddedInTheirOrder) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1);
  const int x = p.mm(0, p.input(), w0);
  int sum = p.mm(1, p.mul(0, x, w0), w1);
  sum = p.mul(1, sum, p.mm(1, x, w1));
  sum = p.mul(1, sum, p.mm(0, x, w0));
  sum = p.mul(1, sum, p.tanh(0, x));
  p.loss(1, sum);
  EXPECT_EQ(expect_same(p, 2, {.gradient = Goes::kHome}).pieces, (std::vector<int>{1, 1}));
}

TEST(Pieces, MicroBatchesAreOpenAtOnce) {
  Program p;
  const int tied = p.parameter(0), w1 = p.parameter(1), w2 = p.parameter(2);
  p.loss(0, p.mm(0, p.mm(2, p.mm(1, p.mm(0, p.input(), tied), w1), w2), tied));
  for (const int open : {1, 2, 4}) expect_same(p, 3, {.micro_batches = 4, .open = open});
}

// --- writes ---

at::Tensor add_into(const Tensors& t) { return at::Tensor(t[0]).add_(t[1]); }
at::Tensor mul_into(const Tensors& t) { return at::Tensor(t[0]).mul_(t[1].clone()); }
at::Tensor copy_into(const Tensors& t) { return at::Tensor(t[0]).copy_(t[1]); }

/// Two stages, x of the first, y of the second, which uses x.
struct TwoStages : Program {
  int w0 = parameter(0), w1 = parameter(1);
  int x = mm(0, input(), w0);
  int y = mm(1, x, w1);
};

TEST(PiecesWrites, IntoATensorOfTheFirstStageByTheSecondOne) {
  TwoStages p;
  p.write({p.x, p.y}, add_into);
  p.loss(0, p.mm(0, p.x, p.w0));
  EXPECT_EQ(expect_same(p, 2).pieces, (std::vector<int>{2, 1}));
}

TEST(PiecesWrites, IntoATensorOfTheSecondStageByTheFirstOne) {
  TwoStages p;
  p.write({p.y, p.x}, mul_into);
  p.loss(1, p.mm(1, p.tanh(1, p.y), p.w1));
  expect_same(p, 2);
}

TEST(PiecesWrites, IntoATensorAtHomeAfterItWasSent) {
  TwoStages p;
  p.write({p.x, p.input()}, add_into);
  p.loss(1, p.mm(1, p.mm(0, p.x, p.w0), p.y));
  expect_same(p, 2);
}

TEST(PiecesWrites, IntoATensorByItself) {
  TwoStages p;
  p.write({p.x, p.x}, add_into);
  p.write({p.x, p.y}, add_into);
  p.write({p.x, p.x}, add_into);
  p.loss(0, p.mm(0, p.x, p.w0));
  expect_same(p, 2);
}

TEST(PiecesWrites, IntoAViewThatWasTakenBefore) {
  TwoStages p;
  const int row = p.view(p.x, [](const at::Tensor& t) { return t[1]; });
  const int used = p.mm(1, p.x, p.w1);
  p.write({row, p.compute(1, {used}, [](const Tensors& t) { return t[0].sum(0); })}, add_into);
  p.loss(0, p.add(0, p.mm(0, p.x, p.w0), p.tanh(0, row)));
  expect_same(p, 2);
}

TEST(PiecesWrites, IntoAViewWhoseBaseAndOtherViewsAreUsedAfterwards) {
  TwoStages p;
  const int upper = p.view(p.x, [](const at::Tensor& t) { return t.narrow(0, 0, 3); });
  const int other = p.view(p.x, [](const at::Tensor& t) { return t.t().narrow(1, 1, 3); });
  p.write({upper, p.compute(1, {p.y}, [](const Tensors& t) { return at::sin(t[0].narrow(0, 1, 3)); })}, mul_into);
  const int a = p.compute(0, {p.x, other, upper}, [](const Tensors& t) { return t[0].mm(t[1]).mm(t[2]); });
  const int b = p.compute(1, {other, p.x, a}, [](const Tensors& t) { return t[2].mm(t[1]).mm(t[0]); });
  p.loss(0, b);
  expect_same(p, 2);
}

TEST(PiecesWrites, MasksOfBothStages) {
  TwoStages p;
  const int mask = p.compute(1, {p.y}, [](const Tensors& t) { return t[0] > 0; });
  p.write({p.x, mask}, [](const Tensors& t) { return at::Tensor(t[0]).masked_fill_(t[1], 0.5); });
  const int own = p.compute(0, {p.x}, [](const Tensors& t) { return t[0] < 0; });
  p.write({p.y, own}, [](const Tensors& t) { return at::Tensor(t[0]).masked_fill_(t[1], 0.25); });
  p.loss(1, p.mm(1, p.mul(1, p.x, p.y), p.w1));
  expect_same(p, 2);
}

TEST(PiecesWrites, OfBothStagesIntoOneBuffer) {
  TwoStages p;
  const int buffer = p.compute(0, {p.x}, [](const Tensors& t) { return at::zeros_like(t[0]); });
  const auto into = [](int64_t row) {
    return [row](const Tensors& t) {
      return at::Tensor(t[0]).index_add_(0, at::tensor({row, row + 1}), t[1].narrow(0, 0, 2));
    };
  };
  p.write({buffer, p.x}, into(0));
  p.write({buffer, p.y}, into(1));
  p.write({buffer, p.mm(1, buffer, p.w1)}, into(2));
  p.loss(0, p.mm(0, buffer, p.w0));
  expect_same(p, 2);
}

TEST(PiecesWrites, ThatAutogradDoesNotSee) {
  TwoStages p;
  const int detached = p.view(p.y, [](const at::Tensor& t) { return t.detach(); });
  p.write({detached, p.x}, [](const Tensors& t) { return at::Tensor(t[0]).add_(t[1].detach()); });
  p.loss(0, p.add(0, p.x, p.y));
  expect_same(p, 2);
}

TEST(PiecesWrites, IntoAViewThatALaterPieceHasMade) {
  TwoStages p;
  const int z = p.add(0, p.y, p.x);
  const int row =
      p.view(p.view(p.x, [](const at::Tensor& t) { return t.t(); }), [](const at::Tensor& t) { return t[1]; });
  p.write({row, p.compute(0, {z}, [](const Tensors& t) { return t[0].sum(0); })}, mul_into);
  p.loss(0, p.add(0, p.x, p.mul(0, z, row)));
  expect_same(p, 2);
}

TEST(PiecesWrites, ThroughChainsOfViews) {
  TwoStages p;
  const int chain = p.view(p.view(p.x, [](const at::Tensor& t) { return t.t(); }),
                           [](const at::Tensor& t) { return t.narrow(0, 1, 2).narrow(1, 0, 2); });
  p.write({chain, p.y}, [](const Tensors& t) { return at::Tensor(t[0]).copy_(t[1].narrow(0, 0, 2).narrow(1, 2, 2)); });
  p.write({p.x, p.y}, [](const Tensors& t) { return at::Tensor(t[0]).select(1, 3).copy_(t[1].select(0, 1)); });
  p.write({p.x}, [](const Tensors& t) {
    return at::Tensor(t[0]).index_put_({t[0] > 1}, at::scalar_tensor(0.5, at::kDouble));
  });
  p.loss(0, p.compute(0, {p.x, chain}, [](const Tensors& t) { return t[0].mm(t[0]).narrow(0, 0, 2).sum() * t[1]; }));
  expect_same(p, 2);
}

TEST(PiecesWrites, OverThreeVisits) {
  TwoStages p;
  p.write({p.x, p.y}, add_into);
  const int z = p.mm(1, p.x, p.w1);
  p.write({p.x, z}, copy_into);
  p.write({p.y, p.x}, mul_into);
  const int last = p.mm(0, p.y, p.w0);
  p.write({p.x, last}, add_into);
  p.loss(1, p.mm(1, p.x, p.y));
  expect_same(p, 2);
}

TEST(PiecesWrites, IntoWhatEveryStageUsedAndUsesAgain) {
  Program p;
  const int w0 = p.parameter(0), w1 = p.parameter(1), w2 = p.parameter(2);
  const int x = p.mm(0, p.input(), w0);
  int y = p.mm(2, p.add(2, p.mm(1, x, w1), x), w2);
  p.write({x, y}, add_into);
  y = p.mm(2, p.add(2, p.mm(1, x, w1), x), w2);
  p.loss(0, p.mm(0, p.add(0, x, y), w0));
  expect_same(p, 3);
}

TEST(PiecesWrites, ManyPlacesOfOneTensorByOneOperator) {
  TwoStages p;
  const int first = p.view(p.x, [](const at::Tensor& t) { return t[0]; });
  const int second = p.view(p.x, [](const at::Tensor& t) { return t[2]; });
  const int row = p.compute(1, {p.y}, [](const Tensors& t) { return t[0].sum(0); });
  p.write({first, row}, add_into);
  p.write({second, row}, mul_into);
  p.loss(0, p.compute(0, {first, p.x, second}, [](const Tensors& t) { return at::mm(t[1], t[1]) * t[0] * t[2]; }));
  expect_same(p, 2);
}

TEST(PiecesWrites, OfComplexNumbersThroughTheirRealParts) {
  TwoStages p;
  const int z = p.compute(0, {p.x}, [](const Tensors& t) { return at::complex(t[0], at::sin(t[0].clone())); });
  const int parts = p.view(z, [](const at::Tensor& t) { return at::view_as_real(t); });
  const int y = p.compute(1, {z, p.w1}, [](const Tensors& t) { return at::real(t[0]).clone().mm(t[1]); });
  p.write({parts, y}, [](const Tensors& t) { return at::Tensor(t[0]).mul_(t[1].unsqueeze(-1)); });
  p.loss(0, p.compute(0, {z, parts}, [](const Tensors& t) { return at::abs(t[0]) + t[1].select(2, 0); }));
  expect_same(p, 2);
}

TEST(PiecesWrites, WithoutGradientsLeaveTheHistory) {
  TwoStages p;
  p.has_gradients = false;
  p.write({p.x, p.y}, add_into);
  p.has_gradients = true;
  p.loss(0, p.add(0, p.x, p.y));
  expect_same(p, 2);
}

TEST(PiecesWrites, IntoAViewOfAStandInIsRefused) {
  Pieces pieces;
  const at::Tensor x = at::ones({2, 2}).requires_grad_() * 2;
  pieces.note_sent();
  pieces.begin_receive();
  const at::Tensor view = pieces.cross(x).view({4});
  EXPECT_SAYS(testing::named_error_of([&] { pieces.begin_write(view); }), "UnsupportedError");
}

// --- random programs ---

/// A program of `operators` operators over `stages` stages, the same for a seed.
Program random_program(int stages, int operators, int64_t seed) {
  Program p;
  std::mt19937_64 random(seed);
  const auto below = [&random](size_t n) { return static_cast<int>(random() % n); };
  std::vector<int> parameters, whole, halves, writable;
  const auto one_of = [&](const std::vector<int>& of) { return of[below(of.size())]; };
  for (int stage = 0; stage < stages; ++stage)
    for (int i = 0; i < 2; ++i) parameters.push_back(p.parameter(stage));
  const int scale = p.parameter(below(stages), {4});
  whole.push_back(p.mm(0, p.input(), parameters[0]));
  const auto half = [](const at::Tensor& t, int from) { return t.narrow(0, from, 2); };
  for (int i = 0; i < operators; ++i) {
    const int home = below(stages);
    switch (below(12)) {
      case 0:
      case 1:
        whole.push_back(p.mm(home, one_of(whole), parameters[2 * home + below(2)]));
        break;
      case 2:
        whole.push_back(p.mm(home, one_of(whole), one_of(parameters)));
        break;  // tied, or it travels
      case 3:
        whole.push_back(p.add(home, one_of(whole), one_of(whole)));
        break;
      case 4:
        whole.push_back(p.mul(home, p.tanh(home, one_of(whole)), one_of(whole)));
        break;
      case 5:
        whole.push_back(p.mul(home, one_of(whole), scale));
        break;
      case 6:
        whole.push_back(p.compute(home, {one_of(whole), one_of(whole), one_of(whole)}, [](const Tensors& t) {
          const at::Tensor sum = at::sin(t[0].clone()) + t[1];  // which argument is asked first matters
          return sum - at::cos(t[2].clone()) + t[0] * 0.5;
        }));
        break;
      case 7:
        whole.push_back(p.view(one_of(whole), [](const at::Tensor& t) { return t.t(); }));
        break;
      case 8: {
        const int from = below(3);
        halves.push_back(p.view(one_of(whole), [half, from](const at::Tensor& t) { return half(t, from); }));
        break;
      }
      case 9:
        if (halves.empty()) break;
        whole.push_back(p.compute(home, {one_of(halves), one_of(halves)}, [](const Tensors& t) {
          return at::tanh(at::cat({t[0], t[1] * 0.5}));
        }));
        break;
      case 10: {
        const int written = one_of(whole);
        const int from = one_of(whole);
        switch (below(3)) {
          case 0:
            p.write({written, from}, [](const Tensors& t) { return at::Tensor(t[0]).add_(t[1].clone(), 0.5); });
            break;
          case 1:
            p.write({written, from}, [](const Tensors& t) { return at::Tensor(t[0]).mul_(t[1].clone().tanh()); });
            break;
          default:
            p.write({written}, [](const Tensors& t) { return at::Tensor(t[0]).clamp_(-1, 1); });
        }
        if (halves.empty()) break;
        p.write({one_of(halves), one_of(halves)},
                [](const Tensors& t) { return at::Tensor(t[0]).copy_(t[1].clone()); });
        break;
      }
      default: {
        if (below(2) == 0) {
          whole.push_back(p.view(one_of(whole), [](const at::Tensor& t) { return t.detach(); }));
          break;
        }
        p.has_gradients = false;
        whole.push_back(p.tanh(home, one_of(whole)));
        p.has_gradients = true;
      }
    }
  }
  const int home = below(stages);
  int sum = p.add(home, whole.back(), p.mm(home, one_of(whole), parameters[2 * home]));
  for (int i = 0; i < 3; ++i) sum = p.add(below(stages), sum, one_of(whole));
  p.loss(below(stages), sum);
  return p;
}

/// Whether one process computes it. Not where it writes what backward needs, or a view of what must not be written.
bool is_valid(const Program& program) {
  try {
    run_plainly(program, 1);
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

/// PIECES_SEED and PIECES_PROGRAMS choose others.
TEST(PiecesOfRandomPrograms, HaveTheBitsOfOneProcess) {
  const char* first = std::getenv("PIECES_SEED");
  const char* number = std::getenv("PIECES_PROGRAMS");
  int left = number != nullptr ? std::atoi(number) : 30;
  int rounded = 0;
  for (int64_t seed = first != nullptr ? std::atoll(first) : 1; left > 0 && !HasFailure(); ++seed) {
    const int stages = 2 + static_cast<int>(seed % 3);
    const Program program = random_program(stages, 10 + static_cast<int>(seed % 20), seed);
    if (!is_valid(program)) continue;
    SCOPED_TRACE(str("seed ", seed, ", ", stages, " stages\n", program.text()));
    const int open = 1 + static_cast<int>(seed % 2);
    rounded += expect_same(program, stages, {.open = open}).may_round_otherwise;
    expect_same(program, stages, {.open = open, .gradient = Goes::kHome, .may_round_otherwise = true});
    --left;
  }
  std::cout << rounded << " of the programs may round otherwise\n";
}

// --- one stage ---

Pieces::Roots run(Pieces& pieces, int piece) {
  Pieces::Roots roots = pieces.roots(piece);
  if (!roots.edges.empty())
    torch::autograd::Engine::get_default_engine().execute(roots.edges, roots.gradients, false, false, true);
  return roots;
}

TEST(PiecesOfOneStage, WhatIsReceivedMayBeWrittenAtOnce) {
  Pieces pieces;
  const at::Tensor data = at::tensor({-1.0, 2.0});
  at::Tensor x = pieces.received(data, {1, 5});
  at::relu_(x);
  pieces.root(x.sum(), at::ones({}, at::kDouble));
  run(pieces, 0);
  const auto gradients = pieces.take_gradients(0);
  ASSERT_EQ(gradients.size(), 1u);
  EXPECT_EQ(gradients[0].first, (TransferId{1, 5}));
  EXPECT_TRUE(at::equal(gradients[0].second, at::tensor({0.0, 1.0})));
}

TEST(PiecesOfOneStage, NoGradientOfAReceiverLeavesTheRootOut) {
  Pieces pieces;
  const at::Tensor w = at::ones({2}).requires_grad_();
  const at::Tensor x = pieces.received(at::ones({2}), {1, 0});
  pieces.sent(x * w, {2, 0});
  EXPECT_EQ(pieces.wanted(0), (std::vector<TransferId>{{2, 0}}));
  pieces.put({2, 0}, {});
  EXPECT_TRUE(run(pieces, 0).edges.empty());
  EXPECT_FALSE(pieces.take_gradients(0)[0].second.defined());
  EXPECT_FALSE(w.grad().defined());
}

TEST(PiecesOfOneStage, AGradientThatIsMissingIsAnError) {
  Pieces pieces;
  pieces.sent(at::ones({2}).requires_grad_() * 2, {2, 7});
  EXPECT_SAYS(testing::named_error_of([&] { pieces.roots(0); }), "transfer 7 to stage 2 is missing");
}

TEST(PiecesOfOneStage, PiecesRunInReverse) {
  Pieces pieces;
  pieces.note_sent();
  pieces.begin_receive();
  ASSERT_EQ(pieces.count(), 2);
  EXPECT_SAYS(testing::named_error_of([&] { pieces.roots(0); }), "piece 0 of 2");
  pieces.roots(1);
  pieces.take_gradients(1);
  pieces.roots(0);
}

TEST(PiecesOfOneStage, WithoutGradientsNothingCrosses) {
  Pieces pieces;
  const at::Tensor x = at::ones({2}).requires_grad_() * 2;
  const auto history = x.grad_fn();
  const at::NoGradGuard no_gradients;
  pieces.sent(x, {1, 0});
  EXPECT_TRUE(pieces.wanted(0).empty());
  pieces.begin_receive();
  EXPECT_TRUE(pieces.cross(x).is_same(x));
  pieces.begin_write(x);
  EXPECT_EQ(x.grad_fn(), history);
}

TEST(PiecesOfOneStage, ARootWithoutAGraphIsAnError) {
  Pieces pieces;
  EXPECT_SAYS(testing::named_error_of([&] { pieces.root(at::ones({2}), at::ones({2})); }), "StateError: backward");
}

TEST(PiecesOfOneStage, AViewsNodeIsMadeAnewByNobodyButItsOperator) {
  Pieces pieces;
  const at::Tensor x = at::ones({2, 2}).requires_grad_() * 2;
  const at::Tensor row = x[0];
  at::Tensor(x).mul_(3);
  const auto* const node = torch::autograd::impl::grad_fn_unsafe(row);
  EXPECT_TRUE(pieces.cross(row).is_same(row));
  EXPECT_EQ(torch::autograd::impl::grad_fn_unsafe(row), node);
}

TEST(PiecesOfOneStage, NoPassSeesWhatPiecesCompute) {
  const testing::CountOf detached("aten::detach");
  Pieces pieces;
  const at::Tensor x = pieces.received(at::ones({2}), {1, 0}) * 2;
  pieces.note_sent();
  pieces.begin_receive();
  EXPECT_FALSE(pieces.cross(x).is_same(x));
  EXPECT_EQ(detached.count, 0);
  x.detach();
  EXPECT_EQ(detached.count, 1) << "this test counts nothing";
}

TEST(PiecesOfOneStage, RunOnce) {
  Pieces pieces;
  pieces.root(pieces.received(at::ones({2}), {1, 0}).sum(), at::ones({}));
  const Pieces::Roots roots = pieces.roots(0);
  auto& engine = torch::autograd::Engine::get_default_engine();
  engine.execute(roots.edges, roots.gradients, true, false, true);
  EXPECT_SAYS(testing::error_of([&] { engine.execute(roots.edges, roots.gradients, true, false, true); }), "twice");
}

TEST(PiecesOfOneStage, NoMemoryOfTheForwardIsKept) {
  const at::Tensor w = at::ones({}).requires_grad_();
  const LiveBytes live;
  Pieces pieces;
  {
    const at::Tensor x = pieces.received(at::ones({1024}), {1, 0}) + w;
    pieces.sent(x, {2, 0});
    pieces.begin_receive();
    const at::Tensor y = pieces.cross(x) + pieces.cross(w);
    pieces.begin_write(x);
    at::Tensor(x).add_(y);
    pieces.sent(x, {2, 1});
  }
  EXPECT_LT(live.bytes(), 1024);
}

TEST(PiecesOfOneStage, AViewIsOfThePieceOfItsBaseAlthoughItsNodeIsMadeAnewLater) {
  Pieces pieces;
  const at::Tensor w = at::ones({2, 2}).requires_grad_();
  const at::Tensor x = w * 2;
  const at::Tensor row = x[0];
  at::Tensor(x).mul_(3);
  pieces.sent(x, {1, 0});
  pieces.begin_receive();
  pieces.root(pieces.cross(row).sum(), at::ones({}));
  EXPECT_EQ(run(pieces, 1).edges.size(), 1u);
  EXPECT_FALSE(w.grad().defined()) << "the second piece has run through the first one";
  pieces.take_gradients(1);
  pieces.put({1, 0}, {});
  run(pieces, 0);
  EXPECT_TRUE(at::equal(w.grad(), at::tensor({6.0f, 6.0f, 0.0f, 0.0f}).view({2, 2})));
}

}  // namespace
}  // namespace trireme::ownership
