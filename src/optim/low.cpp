#include "optim/low.h"

#include <ATen/ScalarOps.h>
#include <ATen/ops/add.h>
#include <ATen/ops/addcdiv.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/lerp.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sqrt.h>

#include <cmath>

#include "trireme/base/error.h"
#include "trireme/device/stream.h"

namespace trireme {
namespace {

/// a + factor b. On a CPU as add(b, factor) has it where it works by vectors: the factor rounded, the sum rounded once.
/// add() rounds the product of a tensor's last elements, up to 63, too, and a shard may end anywhere; addcmul() treats
/// all alike. The product of two 16-bit numbers is exact in fp32.
at::Tensor add_scaled(const at::Tensor& a, const at::Tensor& b, double factor) {
  if (!is_host(a)) return a.add(b, factor);
  const float rounded = at::BFloat16(static_cast<float>(factor));
  return a.addcmul(b, at::ones({}, b.options()), rounded);
}

/// a *= factor in fp32, then rounded, as Python's mul_() has it. That of ATen's C++ takes a Scalar as the first factor,
/// and rounds it.
void scale(const at::Tensor& a, double factor) { at::Tensor(a).mul_(at::native::wrapped_scalar_tensor(factor)); }

at::Tensor decayed(const UpdateSpan& span, const OptimizerOptions& optimizer) {
  return optimizer.weight_decay == 0 ? span.gradients
                                     : add_scaled(span.gradients, span.weights, optimizer.weight_decay);
}

void sgd(const UpdateSpan& span, const OptimizerOptions& optimizer, int64_t step) {
  at::Tensor gradients = decayed(span, optimizer);
  if (optimizer.momentum != 0) {
    if (step == 1) {
      span.first.copy_(gradients);
    } else {
      scale(span.first, optimizer.momentum);
      span.first.add_(gradients);
    }
    gradients = optimizer.nesterov ? add_scaled(gradients, span.first, optimizer.momentum) : span.first;
  }
  span.weights.copy_(add_scaled(span.weights, gradients, -optimizer.lr));
}

void adagrad(const UpdateSpan& span, const OptimizerOptions& optimizer) {
  const at::Tensor gradients = decayed(span, optimizer);
  span.first.addcmul_(gradients, gradients);
  span.weights.addcdiv_(gradients, span.first.sqrt().add_(optimizer.eps), -optimizer.lr);
}

void adam(const UpdateSpan& span, const OptimizerOptions& optimizer, int64_t step) {
  const bool decouples = optimizer.kind == OptimizerKind::kAdamW;
  if (decouples && optimizer.weight_decay != 0) scale(span.weights, 1 - optimizer.lr * optimizer.weight_decay);
  const at::Tensor gradients = decouples ? span.gradients : decayed(span, optimizer);
  span.first.lerp_(gradients, 1 - optimizer.beta1);
  scale(span.second, optimizer.beta2);
  span.second.addcmul_(gradients, gradients, 1 - optimizer.beta2);
  const auto count = static_cast<double>(step);
  const double bias1 = 1 - std::pow(optimizer.beta1, count), bias2 = 1 - std::pow(optimizer.beta2, count);
  const at::Tensor divisor = span.second.sqrt().div_(std::sqrt(bias2)).add_(optimizer.eps);
  span.weights.addcdiv_(span.first, divisor, -(optimizer.lr / bias1));
}

}  // namespace

void update_low(const UpdateSpan& span, const OptimizerOptions& optimizer, double gradient_factor, int64_t step) {
  TRIREME_CHECK(span.gradients.scalar_type() == span.weights.scalar_type(), "gradients in the weights' dtype expected");
  if (gradient_factor != 1) scale(span.gradients, gradient_factor);
  switch (optimizer.kind) {
    case OptimizerKind::kSgd:
      return sgd(span, optimizer, step);
    case OptimizerKind::kAdagrad:
      return adagrad(span, optimizer);
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      return adam(span, optimizer, step);
    case OptimizerKind::kLamb:
    case OptimizerKind::kLion:
    case OptimizerKind::kMuon:
    case OptimizerKind::kClient:
      TRIREME_CHECK(false, optimizer_name(optimizer.kind), " has no update in 16 bits.");
  }
}

}  // namespace trireme
