// How closely an update agrees with another account of it.
#pragma once

#include <ATen/core/Tensor.h>

namespace trireme::testing {

constexpr int kSteps = 50;

// Two accounts differ in the order of a handful of operations: each step rounds a few times, 2^-24 each, which averages
// out over the elements of a model.
constexpr double kTolerance = 1e-6;

inline double relative_difference(const at::Tensor& got, const at::Tensor& expected) {
  const at::Tensor reference = expected.detach().to(at::kDouble).reshape(-1);
  return ((got.detach().to(at::kDouble).reshape(-1) - reference).norm() / reference.norm()).item<double>();
}

}  // namespace trireme::testing
