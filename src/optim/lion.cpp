#include "optim/lion.h"

#include "optim/grain.h"
#include "trireme/base/parallel.h"
#include "trireme/base/vectorised.h"

namespace trireme {
namespace {

TRIREME_VECTORISED void lion_part(float* __restrict weights, const float* __restrict gradients,
                                  float* __restrict momentum, int64_t numel, const LionStep& step) {
  const auto lr = static_cast<float>(step.lr), shrink = static_cast<float>(1 - step.lr * step.weight_decay);
  const auto beta1 = static_cast<float>(step.beta1), rest1 = static_cast<float>(1 - step.beta1);
  const auto beta2 = static_cast<float>(step.beta2), rest2 = static_cast<float>(1 - step.beta2);
  const auto factor = static_cast<float>(step.gradient_factor);
  for (int64_t i = 0; i < numel; ++i) {
    const float gradient = factor * gradients[i];
    const float direction = beta1 * momentum[i] + rest1 * gradient;
    const float sign = static_cast<float>(direction > 0) - static_cast<float>(direction < 0);
    weights[i] = shrink * weights[i] - lr * sign;
    momentum[i] = beta2 * momentum[i] + rest2 * gradient;
  }
}

}  // namespace

void lion(float* weights, const float* gradients, float* momentum, int64_t numel, const LionStep& step) {
  parallel_for(0, numel, kGrain, [&](int64_t begin, int64_t end) {
    lion_part(weights + begin, gradients + begin, momentum + begin, end - begin, step);
  });
}

}  // namespace trireme
