#include "optim/lamb.h"

#include <algorithm>
#include <cmath>

#include "optim/grain.h"
#include "optim/moments.h"
#include "trireme/base/parallel.h"
#include "trireme/base/vectorised.h"

namespace trireme {
namespace {

constexpr int64_t kLanes = 16;  // sums side by side, one per vector element

struct LambFactors {
  LambFactors(const OptimizerOptions& options, double gradient_factor, int64_t step)
      : moments(moment_factors(options.beta1, options.beta2, options.eps, gradient_factor,
                               options.bias_correction ? static_cast<double>(step) : HUGE_VAL)),
        decay(static_cast<float>(options.weight_decay)) {}

  MomentFactors moments;
  float decay;
};

inline float direction(float weight, float first, float second, const LambFactors& f) {
  return moment_ratio(first, second, f.moments) + f.decay * weight;
}

TRIREME_VECTORISED LambNorms moments_part(const float* __restrict weights, const float* __restrict gradients,
                                          float* __restrict first, float* __restrict second, int64_t numel,
                                          const LambFactors& factors) {
  const LambFactors f = factors;
  double weight_sums[kLanes] = {}, update_sums[kLanes] = {};
  for (int64_t begin = 0; begin < numel; begin += kLanes) {
    const int64_t lanes = std::min(kLanes, numel - begin);
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t i = begin + lane;
      move_moments(f.moments.gradient * gradients[i], first[i], second[i], f.moments);
      const double weight = weights[i], update = direction(weights[i], first[i], second[i], f);
      weight_sums[lane] += weight * weight;
      update_sums[lane] += update * update;
    }
  }
  LambNorms norms;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    norms.weights += weight_sums[lane];
    norms.update += update_sums[lane];
  }
  return norms;
}

TRIREME_VECTORISED void apply_part(float* __restrict weights, const float* __restrict first,
                                   const float* __restrict second, int64_t numel, float step_size,
                                   const LambFactors& factors) {
  const LambFactors f = factors;
  for (int64_t i = 0; i < numel; ++i) weights[i] -= step_size * direction(weights[i], first[i], second[i], f);
}

}  // namespace

LambNorms lamb_moments(const at::Tensor& weights, const at::Tensor& gradients, const at::Tensor& first,
                       const at::Tensor& second, const OptimizerOptions& options, double gradient_factor,
                       int64_t step) {
  const LambFactors factors(options, gradient_factor, step);
  const auto* w = weights.const_data_ptr<float>();
  const auto* g = gradients.const_data_ptr<float>();
  auto* m = first.data_ptr<float>();
  auto* v = second.data_ptr<float>();
  const auto part = [&](int64_t begin, int64_t end, const LambNorms& before) {
    const LambNorms norms = moments_part(w + begin, g + begin, m + begin, v + begin, end - begin, factors);
    return LambNorms{before.weights + norms.weights, before.update + norms.update};
  };
  return at::parallel_reduce(0, weights.numel(), kGrain, LambNorms{}, part, [](const LambNorms& a, const LambNorms& b) {
    return LambNorms{a.weights + b.weights, a.update + b.update};
  });
}

double lamb_trust(const LambNorms& norms, const OptimizerOptions& options) {
  if (norms.weights == 0 || norms.update == 0) return 1;
  return std::clamp(std::sqrt(norms.weights / norms.update), options.min_coeff, options.max_coeff);
}

void lamb_apply(const at::Tensor& weights, const at::Tensor& first, const at::Tensor& second,
                const OptimizerOptions& options, double trust, int64_t step) {
  const LambFactors factors(options, 1, step);
  const auto step_size = static_cast<float>(options.lr * trust);
  auto* w = weights.data_ptr<float>();
  const auto* m = first.const_data_ptr<float>();
  const auto* v = second.const_data_ptr<float>();
  parallel_for(0, weights.numel(), kGrain, [&](int64_t begin, int64_t end) {
    apply_part(w + begin, m + begin, v + begin, end - begin, step_size, factors);
  });
}

}  // namespace trireme
