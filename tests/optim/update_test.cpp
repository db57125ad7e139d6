// The arithmetic of a step against torch::optim, parameter by parameter, over the same gradients.
#include "optim/update.h"

#include <gtest/gtest.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "optim/runs.h"
#include "tests/optim/agreement.h"
#include "trireme/base/error.h"
#include "trireme/pager/layout/layout.h"

namespace trireme {
namespace {

using namespace testing;

struct Case {
  std::string name;
  OptimizerOptions options;
};

std::vector<Case> cases() {
  OptimizerOptions adam{.kind = OptimizerKind::kAdam, .lr = 3e-3, .beta1 = 0.8, .beta2 = 0.95};
  OptimizerOptions adam_l2 = adam;
  adam_l2.weight_decay = 0.1;
  OptimizerOptions adamw = adam_l2;
  adamw.kind = OptimizerKind::kAdamW;
  OptimizerOptions sgd{.kind = OptimizerKind::kSgd, .lr = 0.02};
  OptimizerOptions momentum = sgd;
  momentum.momentum = 0.9;
  momentum.weight_decay = 0.05;
  OptimizerOptions nesterov = momentum;
  nesterov.nesterov = true;
  const OptimizerOptions adagrad{.kind = OptimizerKind::kAdagrad, .lr = 0.02, .eps = 1e-10, .weight_decay = 0.05};
  OptimizerOptions lion = adamw;
  lion.kind = OptimizerKind::kLion;
  return {{"Adam", adam},
          {"AdamWithL2", adam_l2},
          {"AdamW", adamw},
          {"Sgd", sgd},
          {"SgdWithMomentum", momentum},
          {"SgdWithNesterov", nesterov},
          {"Adagrad", adagrad},
          {"Lion", lion}};
}

/// Lion's closed form, operator by operator: torch::optim has none.
std::function<void()> lion_reference(const OptimizerOptions& o, const std::vector<at::Tensor>& parameters) {
  auto momenta = std::make_shared<std::vector<at::Tensor>>();
  for (const at::Tensor& parameter : parameters) momenta->push_back(at::zeros_like(parameter.detach()));
  return [o, parameters, momenta] {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) {
      const at::Tensor& gradient = parameters[i].grad();
      if (!gradient.defined()) continue;
      at::Tensor& momentum = momenta->at(i);
      const at::Tensor direction = momentum * o.beta1 + gradient * (1 - o.beta1);
      const at::Tensor moved = parameters[i] * (1 - o.lr * o.weight_decay) - direction.sign() * o.lr;
      at::Tensor(parameters[i]).copy_(moved);
      momentum = momentum * o.beta2 + gradient * (1 - o.beta2);
    }
  };
}

std::function<void()> stepping(std::shared_ptr<torch::optim::Optimizer> optimizer) {
  return [optimizer = std::move(optimizer)] { optimizer->step(); };
}

/// One step of the reference on the gradients that `parameters` have.
std::function<void()> reference(const OptimizerOptions& o, const std::vector<at::Tensor>& parameters) {
  using namespace torch::optim;
  const auto betas = std::make_tuple(o.beta1, o.beta2);
  switch (o.kind) {
    case OptimizerKind::kAdam:
      return stepping(
          std::make_shared<Adam>(parameters, AdamOptions(o.lr).betas(betas).eps(o.eps).weight_decay(o.weight_decay)));
    case OptimizerKind::kAdamW:
      return stepping(
          std::make_shared<AdamW>(parameters, AdamWOptions(o.lr).betas(betas).eps(o.eps).weight_decay(o.weight_decay)));
    case OptimizerKind::kAdagrad:
      return stepping(
          std::make_shared<Adagrad>(parameters, AdagradOptions(o.lr).eps(o.eps).weight_decay(o.weight_decay)));
    case OptimizerKind::kLion:
      return lion_reference(o, parameters);
    case OptimizerKind::kLamb:
    case OptimizerKind::kMuon:
    case OptimizerKind::kClient:
      break;  // whole_parameters_test.cpp, engine/client_optimizer_test.cpp
    case OptimizerKind::kSgd:
      return stepping(std::make_shared<SGD>(
          parameters, SGDOptions(o.lr).momentum(o.momentum).weight_decay(o.weight_decay).nesterov(o.nesterov)));
  }
  return {};
}

const std::vector<std::vector<int64_t>> kShapes = {{10, 13}, {7}, {33, 31}, {1}, {1000}};

/// Parameters in one flat unit of two shards, updated shard by shard as two ranks would.
class FlatUnit {
 public:
  FlatUnit(const std::vector<at::Tensor>& values, at::ScalarType weights, at::ScalarType gradients) {
    std::vector<ParameterSpec> specs;
    for (size_t i = 0; i < values.size(); ++i)
      specs.push_back({.name = "p" + std::to_string(i), .shape = values[i].sizes().vec(), .dtype = weights});
    unit_ = make_layout(specs, 2).units.at(0);
    const auto zeros = [&](at::ScalarType dtype) { return at::zeros({unit_.numel()}, dtype); };
    all_ = {zeros(at::kFloat), zeros(weights), zeros(gradients), zeros(at::kFloat), zeros(at::kFloat)};
    if (weights == at::kFloat) all_.weights = all_.master;
    for (const ParameterPlace& placement : unit_.parameters)
      part(all_.master, placement).copy_(values[placement.index].reshape(-1));
    all_.weights.copy_(all_.master);
    steps_.resize(values.size());
  }

  void step(const std::vector<at::Tensor>& gradients, const OptimizerOptions& options, double gradient_factor) {
    const std::vector<int> group_of(gradients.size(), 0);
    std::vector<bool> touched(gradients.size());
    for (const ParameterPlace& placement : unit_.parameters) {
      touched[placement.index] = gradients[placement.index].defined();
      if (touched[placement.index]) part(all_.gradients, placement).copy_(gradients[placement.index].reshape(-1));
    }
    for (int64_t rank = 0; rank < 2; ++rank) {
      const int64_t begin = rank * unit_.shard_numel;
      const UpdateSpan shard = all_.slice(begin, begin + unit_.shard_numel);
      for (const Run& run : plan_runs(unit_, begin, unit_.shard_numel, touched, steps_, group_of))
        update(shard.slice(run.begin, run.end), options, gradient_factor, run.step);
    }
    for (size_t i = 0; i < steps_.size(); ++i) steps_[i] += touched[i] ? 1 : 0;
  }

  at::Tensor master(size_t parameter) const { return of(all_.master, parameter); }
  at::Tensor weights(size_t parameter) const { return of(all_.weights, parameter); }

  double padding_norm() const {
    double sum = 0;
    for (const at::Tensor& tensor : {all_.master, all_.weights, all_.first, all_.second}) {
      at::Tensor padding = tensor.to(at::kDouble).clone();
      for (const ParameterPlace& placement : unit_.parameters) part(padding, placement).zero_();
      sum += padding.abs().sum().item<double>();
    }
    return sum;
  }

 private:
  static at::Tensor part(const at::Tensor& flat, const ParameterPlace& placement) {
    return flat.narrow(0, placement.begin, placement.numel);
  }
  at::Tensor of(const at::Tensor& flat, size_t parameter) const {
    for (const ParameterPlace& placement : unit_.parameters)
      if (placement.index == static_cast<int>(parameter)) return part(flat, placement);
    return {};
  }

  UnitLayout unit_;
  UpdateSpan all_;
  std::vector<int64_t> steps_;
};

std::vector<at::Tensor> random_tensors(at::Generator& generator) {
  std::vector<at::Tensor> tensors;
  for (const auto& shape : kShapes) tensors.push_back(at::randn(shape, generator));
  return tensors;
}

class Update : public ::testing::TestWithParam<Case> {};

TEST_P(Update, AgreesWithTorchOptimAfterFiftyClippedStepsOfWhichSomeLeaveParametersUntouched) {
  const OptimizerOptions& options = GetParam().options;
  at::Generator generator = at::detail::createCPUGenerator(7);
  const std::vector<at::Tensor> start = random_tensors(generator);
  FlatUnit unit(start, at::kFloat, at::kFloat);
  std::vector<at::Tensor> expected;
  for (const at::Tensor& tensor : start) expected.push_back(tensor.clone().requires_grad_());
  const auto step_reference = reference(options, expected);

  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> gradients = random_tensors(generator);
    if (step % 2 == 1) gradients[1] = at::Tensor();
    if (step < 5) gradients[4] = at::Tensor();
    const double factor = step % 3 == 0 ? 1 : 0.37;
    unit.step(gradients, options, factor);
    for (size_t i = 0; i < expected.size(); ++i)
      expected[i].mutable_grad() = gradients[i].defined() ? gradients[i] * factor : at::Tensor();
    step_reference();
  }
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE(relative_difference(unit.master(i), expected[i].detach()), kTolerance) << "parameter " << i;
  EXPECT_EQ(unit.padding_norm(), 0);
}

void keeps_masters(const OptimizerOptions& options, at::ScalarType weights, at::ScalarType dtype) {
  SCOPED_TRACE(str(at::toString(weights), " weights, ", at::toString(dtype), " gradients"));
  at::Generator generator = at::detail::createCPUGenerator(11);
  const std::vector<at::Tensor> start = random_tensors(generator);
  FlatUnit unit(start, weights, dtype);
  std::vector<at::Tensor> expected;
  for (const at::Tensor& tensor : start) expected.push_back(tensor.clone().requires_grad_());
  const auto step_reference = reference(options, expected);

  for (int step = 0; step < kSteps; ++step) {
    std::vector<at::Tensor> gradients = random_tensors(generator);
    for (at::Tensor& gradient : gradients) gradient = gradient.to(dtype);
    unit.step(gradients, options, 0.5);
    for (size_t i = 0; i < expected.size(); ++i) expected[i].mutable_grad() = gradients[i].to(at::kFloat) * 0.5;
    step_reference();
  }
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_LE(relative_difference(unit.master(i), expected[i].detach()), kTolerance) << "parameter " << i;
    EXPECT_TRUE(at::equal(unit.weights(i), unit.master(i).to(weights))) << "parameter " << i;
  }
  EXPECT_EQ(unit.padding_norm(), 0);
}

TEST_P(Update, KeepsFp32MastersOf16BitWeightsAndRoundsThemOnce) {
  for (const at::ScalarType weights : {at::kBFloat16, at::kHalf})
    for (const at::ScalarType gradients : {at::kFloat, at::kBFloat16, at::kHalf})
      keeps_masters(GetParam().options, weights, gradients);
}

INSTANTIATE_TEST_SUITE_P(AllOptimizers, Update, ::testing::ValuesIn(cases()),
                         [](const ::testing::TestParamInfo<Case>& info) { return info.param.name; });

struct Spans {
  UpdateSpan whole;
  UpdateSpan other;
};

/// The same values twice; the first as bf16 weights with masters, the second with those weights or in fp32.
Spans equal_spans(int64_t numel, bool both_bf16) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  const at::Tensor start = at::randn({numel}, generator);
  const at::Tensor gradients = at::randn({numel}, generator);
  const auto make = [&](bool bf16) {
    UpdateSpan span{start.clone(), {}, gradients.clone(), at::zeros({numel}), at::zeros({numel})};
    span.weights = bf16 ? start.to(at::kBFloat16) : span.master;
    return span;
  };
  return {make(true), make(both_bf16)};
}

TEST(Update, BlocksOf16BitWeightsGiveTheSameBitsAsOneCall) {
  const auto [blocks, fp32] = equal_spans((int64_t{1} << 17) + 96, false);  // several blocks and a short one
  const OptimizerOptions options{.kind = OptimizerKind::kAdagrad, .lr = 0.01, .weight_decay = 0.01};
  for (int64_t step = 1; step <= 3; ++step) {
    update(fp32, options, 1, step);
    update(blocks, options, 1, step);
  }
  EXPECT_TRUE(at::equal(blocks.master, fp32.master));
}

TEST(Update, OfAdamIn16BitGivesTheSameBitsWhereverTheSpanIsCut) {
  const int64_t numel = (int64_t{1} << 16) + 96;
  const auto [whole, cut] = equal_spans(numel, true);
  const OptimizerOptions options{.lr = 0.01, .weight_decay = 0.01};
  for (int64_t step = 1; step <= 3; ++step) {
    update(whole, options, 0.7, step);
    const std::vector<int64_t> cuts{0, 1, 18, 3333, numel};
    for (size_t i = 0; i + 1 < cuts.size(); ++i) update(cut.slice(cuts[i], cuts[i + 1]), options, 0.7, step);
  }
  EXPECT_TRUE(at::equal(whole.master, cut.master));
  EXPECT_TRUE(at::equal(whole.weights, cut.weights));
}

}  // namespace
}  // namespace trireme
