// Lion's update, which ATen has no fused kernel for.
#pragma once

#include <cstdint>

namespace trireme {

struct LionStep {
  double lr = 0;
  double beta1 = 0;
  double beta2 = 0;
  double weight_decay = 0;
  double gradient_factor = 1;
};

/// With g = gradient_factor * gradients: weights shrink by lr * weight_decay and move by lr against the sign of
/// beta1 * momentum + (1 - beta1) g; then momentum becomes beta2 * momentum + (1 - beta2) g. All [numel].
///
/// Cost      one pass: reads 12, writes 8 bytes per element.
/// Source    Chen et al. 2023, arXiv:2302.06675. Test: update_test.cpp.
void lion(float* weights, const float* gradients, float* momentum, int64_t numel, const LionStep& step);

}  // namespace trireme
