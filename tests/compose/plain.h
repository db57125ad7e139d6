// The same training in one process with plain libtorch: no engine, no ranks, optimizers by their formulae.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <regex>
#include <string>

#include "tests/compose/scenario.h"

namespace trireme::compose {

/// One parameter and the states of its optimizer.
class PlainParameter {
 public:
  PlainParameter(std::string name, at::Tensor weight, const Scenario& scenario)
      : name_(std::move(name)), weight_(std::move(weight)), scenario_(scenario) {
    for (const ParameterGroup& group : scenario.parameter_groups)
      if (std::regex_search(name_, std::regex(group.patterns.at(0))))
        lr_ = *group.lr, weight_decay_ = *group.weight_decay;
  }

  const std::string& name() const { return name_; }
  const at::Tensor& weight() const { return weight_; }
  const at::Tensor& gradient() const { return weight_.grad(); }

  /// Step `number`, from 0; `lr`: of a schedule.
  void update(const at::Tensor& gradient, int number, std::optional<double> lr) {
    const at::NoGradGuard no_grad;
    if (!first_.defined()) first_ = at::zeros_like(weight_), second_ = at::zeros_like(weight_);
    if (scenario_.has_client_optimizer) return sgd(gradient, lr.value_or(kClientLr));
    const double rate = lr.value_or(lr_);
    weight_.mul_(1 - rate * weight_decay_);
    const bool is_muon = scenario_.config.at("optimizer").at("type") == "Muon";
    if (is_muon && weight_.dim() == 2 && name_.find("embed") == std::string::npos) return muon(gradient, rate);
    // AdamW, whose first moment is the gradient.
    second_ = second_ * kBeta2 + gradient * gradient * (1 - kBeta2);
    weight_.sub_(gradient / ((second_ / (1 - std::pow(kBeta2, number + 1))).sqrt() + kEps) * rate);
  }

 private:
  void sgd(const at::Tensor& gradient, double lr) {
    first_ = first_ * kClientMomentum + gradient;
    weight_.sub_(first_ * lr);
  }
  /// Without a momentum. Source: Jordan's Newton-Schulz iteration.
  void muon(const at::Tensor& gradient, double lr) {
    at::Tensor x = gradient / (gradient.norm() + 1e-7);
    for (int i = 0; i < 5; ++i) {
      const at::Tensor gram = x.mm(x.t());
      x = x * 3.4445 + (gram * -4.7750 + gram.mm(gram) * 2.0315).mm(x);
    }
    const double ratio = static_cast<double>(x.size(0)) / static_cast<double>(x.size(1));
    weight_.sub_(x * (lr * std::sqrt(std::max(1.0, ratio))));
  }

  const std::string name_;
  const at::Tensor weight_;
  const Scenario& scenario_;
  double lr_ = kLr, weight_decay_ = kWeightDecay;
  at::Tensor first_, second_;
};

/// The schedule's learning rate in step `number`.
inline std::optional<double> plain_lr(const Scenario& scenario, int number) {
  if (!scenario.config.contains("scheduler")) return {};
  return kFirstLr * (1 + kLrRate * number);
}

/// The outcome of training `scenario` plainly: only the optimizer, its schedule and groups, and the number of ranks are
/// looked at.
inline Outcome train_plainly(const Scenario& scenario) {
  const auto net = make_model();
  std::vector<PlainParameter> parameters;
  for (const auto& item : net->named_parameters()) parameters.emplace_back(item.key(), item.value(), scenario);
  const bool is_sum = scenario.config.value("gradient_allreduce_op", "mean") == "sum";
  const int micro_batches = scenario.micro_batches();
  const double weight = (is_sum ? scenario.data : 1.0) / micro_batches;
  Outcome outcome;
  for (int number = 0; number < kSteps; ++number) {
    StepRecord& record = outcome.steps.emplace_back();
    net->zero_grad();
    for (int i = 0; i < micro_batches; ++i) {
      const trireme::MicroBatch batch = micro_batch(number * micro_batches + i);
      const at::Tensor loss = net->loss(batch.inputs.toTensor(), batch.labels.toTensor());
      (loss * weight).backward();
      record.loss += loss.item<double>() / micro_batches;
    }
    double squares = 0;
    for (const PlainParameter& parameter : parameters) {
      record.gradients[parameter.name()] = parameter.gradient().clone();
      squares += std::pow(parameter.gradient().to(at::kDouble).norm().item<double>(), 2);
    }
    record.norm = std::sqrt(squares);
    const double factor = std::min(1.0, kMaxNorm / (record.norm + 1e-6));
    for (PlainParameter& parameter : parameters)
      parameter.update(parameter.gradient() * factor, number, plain_lr(scenario, number));
  }
  outcome.parameters = parameters_of(*net);
  return outcome;
}

}  // namespace trireme::compose
