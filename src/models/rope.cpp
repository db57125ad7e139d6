#include "models/rope.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/pow.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

namespace trireme {

RopeAngles RopeCache::angles(int64_t begin, int64_t count, const at::TensorOptions& options) {
  const int64_t end = begin + count;
  const bool fits = cached_.cos.defined() && cached_.cos.size(0) >= end &&
                    cached_.cos.scalar_type() == c10::typeMetaToScalarType(options.dtype()) &&
                    cached_.cos.device() == options.device();
  if (!fits) {
    // Generation asks for one position more at a time: doubling keeps that from computing the table anew for each.
    const int64_t known = cached_.cos.defined() ? cached_.cos.size(0) : 0;
    compute(begin == 0 ? end : std::max(end, 2 * known), options);
  }
  return {cached_.cos.slice(0, begin, end), cached_.sin.slice(0, begin, end)};
}

RopeAngles RopeCache::angles(const at::Tensor& positions, const at::TensorOptions& options) const {
  const at::NoGradGuard no_grad;
  const auto fp32 = options.dtype(at::kFloat).requires_grad(false);
  const auto exponents = at::arange(0, head_dim_, 2, fp32) / static_cast<double>(head_dim_);
  const auto frequencies = at::pow(theta_, exponents).reciprocal();
  const auto angles = positions.to(at::kFloat).view({-1, 1, 1}) * frequencies;
  return {angles.cos().to(options.dtype()), angles.sin().to(options.dtype())};
}

void RopeCache::compute(int64_t positions, const at::TensorOptions& options) {
  // A table made under inference mode could not be saved for the backward of a later training step.
  const c10::InferenceMode normal_mode(false);
  cached_ = angles(at::arange(positions, options.dtype(at::kLong).requires_grad(false)), options);
}

at::Tensor apply_rope(const at::Tensor& x, const RopeAngles& angles) {
  const auto halves = x.chunk(2, -1);
  const auto& a = halves[0];
  const auto& b = halves[1];
  // Rounds as x * cos + rotate_half(x) * sin does, with half the work: a * c + (-b) * s is a * c - b * s in every bit.
  return at::cat({a * angles.cos - b * angles.sin, b * angles.cos + a * angles.sin}, -1);
}

}  // namespace trireme
