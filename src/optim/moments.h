// The two moments of Adam and Lamb, element by element, for loops that are compiled once per instruction set.
#pragma once

#include <cmath>
#include <cstdint>

#include "trireme/optim/options.h"

namespace trireme {

/// Of update number `step`, in the precision that the loops work in.
struct MomentFactors {
  MomentFactors(const OptimizerOptions& options, double gradient_factor, int64_t step, bool bias_correction = true)
      : beta1(static_cast<float>(options.beta1)),
        rest1(static_cast<float>(1 - options.beta1)),
        beta2(static_cast<float>(options.beta2)),
        rest2(static_cast<float>(1 - options.beta2)),
        unbias1(bias_correction ? unbias(options.beta1, step) : 1),
        unbias2(bias_correction ? unbias(options.beta2, step) : 1),
        eps(static_cast<float>(options.eps)),
        gradient(static_cast<float>(gradient_factor)) {}

  float beta1, rest1, beta2, rest2;  ///< rest = 1 - beta
  float unbias1, unbias2;            ///< 1 / (1 - beta^step)
  float eps, gradient;

 private:
  static float unbias(double beta, int64_t step) {
    return static_cast<float>(1 / (1 - std::pow(beta, static_cast<double>(step))));
  }
};

/// `gradient` is scaled already.
inline void move_moments(float gradient, float& first, float& second, const MomentFactors& f) {
  first = f.beta1 * first + f.rest1 * gradient;
  second = f.beta2 * second + f.rest2 * gradient * gradient;
}

/// m̂ / (√v̂ + eps)
inline float moment_ratio(float first, float second, const MomentFactors& f) {
  return first * f.unbias1 / (std::sqrt(second * f.unbias2) + f.eps);
}

}  // namespace trireme
