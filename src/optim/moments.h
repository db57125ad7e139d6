// The two moments of Adam and Lamb, element by element: for loops that are compiled once per instruction set, and for
// GPUs when one is used (adam_kernel.h), where there are no headers of the host.
#pragma once

#ifndef __CUDACC_RTC__
#include <cmath>
#endif

namespace trireme {

/// The factors of one update, in the precision that the loops work in.
struct MomentFactors {
  float beta1, rest1, beta2, rest2;  ///< rest = 1 - beta
  float unbias1, unbias2;            ///< 1 / (1 - beta^step); 1 without bias correction
  float eps, gradient;               ///< gradients are multiplied by the latter
};

/// Update number `step`, the first of which is 1; an infinite one is without bias correction.
inline MomentFactors moment_factors(double beta1, double beta2, double eps, double gradient, double step) {
  return {static_cast<float>(beta1),
          static_cast<float>(1 - beta1),
          static_cast<float>(beta2),
          static_cast<float>(1 - beta2),
          static_cast<float>(1 / (1 - pow(beta1, step))),
          static_cast<float>(1 / (1 - pow(beta2, step))),
          static_cast<float>(eps),
          static_cast<float>(gradient)};
}

/// `gradient` is scaled already.
inline void move_moments(float gradient, float& first, float& second, const MomentFactors& f) {
  first = f.beta1 * first + f.rest1 * gradient;
  second = f.beta2 * second + f.rest2 * gradient * gradient;
}

/// m̂ / (√v̂ + eps)
inline float moment_ratio(float first, float second, const MomentFactors& f) {
  return first * f.unbias1 / (sqrtf(second * f.unbias2) + f.eps);
}

}  // namespace trireme
