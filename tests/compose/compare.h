// How far the records of a run are from those of another.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>

#include "tests/compose/scenario.h"

namespace trireme::compose {

/// Relative to what is expected.
inline double distance(double found, double expected) { return std::abs(found - expected) / std::abs(expected); }

/// Relative to the norm of what is expected.
inline double distance(const at::Tensor& found, const at::Tensor& expected) {
  const at::Tensor other = expected.to(at::kDouble);
  return (found.to(at::kDouble) - other).norm().item<double>() / other.norm().item<double>();
}

/// The weight of one process that `name` is: a stage's copy of a tied layer has a name of its own.
inline std::string name_of_weight(const std::string& name) {
  return name == "lm_head.weight" ? "model.embed_tokens.weight" : name;
}

/// The largest distance of each kind, over steps and parameters.
struct Distances {
  double losses = 0, norms = 0, gradients = 0, weights = 0;
};

/// Requires  `found` has every gradient of `expected`.
inline Distances distances(const Outcome& found, const Outcome& expected) {
  Distances largest;
  const auto raise = [](double& one, double other) { one = std::max(one, other); };
  for (size_t i = 0; i < expected.steps.size(); ++i) {
    const StepRecord &step = found.steps.at(i), &other = expected.steps[i];
    raise(largest.losses, distance(step.loss, other.loss));
    raise(largest.norms, distance(step.norm, other.norm));
    for (const auto& [name, gradient] : other.gradients)
      raise(largest.gradients, distance(step.gradients.at(name), gradient));
  }
  for (const auto& [name, weight] : found.parameters)
    raise(largest.weights, distance(weight, expected.parameters.at(name_of_weight(name))));
  return largest;
}

}  // namespace trireme::compose
