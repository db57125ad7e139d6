#include "optim/adam.h"

#include "optim/adam_element.h"
#include "optim/grain.h"
#include "trireme/base/error.h"
#include "trireme/base/parallel.h"
#include "trireme/base/vectorised.h"

namespace trireme {
namespace {

template <class Weight, class Gradient>
struct Arrays {
  float* master;
  Weight* weights;
  const Gradient* gradients;
  float* first;
  float* second;
  int64_t numel;

  Arrays slice(int64_t begin, int64_t end) const {
    return {master + begin, weights + begin, gradients + begin, first + begin, second + begin, end - begin};
  }
};

template <class Weight, class Gradient>
__attribute__((always_inline)) inline void update_all(const Arrays<Weight, Gradient>& arrays,
                                                      const AdamFactors& factors) {
  const AdamFactors f = factors;
  float* __restrict master = arrays.master;
  Weight* __restrict weights = arrays.weights;
  const Gradient* __restrict gradients = arrays.gradients;
  float* __restrict first = arrays.first;
  float* __restrict second = arrays.second;
  const int64_t numel = arrays.numel;
  for (int64_t i = 0; i < numel; ++i) update_adam(master[i], weights[i], widen(gradients[i]), first[i], second[i], f);
}

// Cloned functions cannot be templates, so each pair of types has one.
TRIREME_VECTORISED void update_part(const Arrays<BFloat16, float>& a, const AdamFactors& f) { update_all(a, f); }
TRIREME_VECTORISED void update_part(const Arrays<BFloat16, BFloat16>& a, const AdamFactors& f) { update_all(a, f); }
TRIREME_VECTORISED void update_part(const Arrays<BFloat16, Float16>& a, const AdamFactors& f) { update_all(a, f); }
TRIREME_VECTORISED void update_part(const Arrays<Float16, float>& a, const AdamFactors& f) { update_all(a, f); }
TRIREME_VECTORISED void update_part(const Arrays<Float16, BFloat16>& a, const AdamFactors& f) { update_all(a, f); }
TRIREME_VECTORISED void update_part(const Arrays<Float16, Float16>& a, const AdamFactors& f) { update_all(a, f); }

template <class Weight, class Gradient>
void update_as(const UpdateSpan& span, const AdamFactors& factors) {
  const Arrays<Weight, Gradient> arrays{span.master.data_ptr<float>(),
                                        static_cast<Weight*>(span.weights.data_ptr()),
                                        static_cast<const Gradient*>(span.gradients.const_data_ptr()),
                                        span.first.data_ptr<float>(),
                                        span.second.data_ptr<float>(),
                                        span.master.numel()};
  parallel_for(0, arrays.numel, kGrain,
               [&](int64_t begin, int64_t end) { update_part(arrays.slice(begin, end), factors); });
}

template <class Weight>
void update_weights(const UpdateSpan& span, const AdamFactors& factors) {
  switch (span.gradients.scalar_type()) {
    case at::kBFloat16:
      return update_as<Weight, BFloat16>(span, factors);
    case at::kHalf:
      return update_as<Weight, Float16>(span, factors);
    default:
      return update_as<Weight, float>(span, factors);
  }
}

}  // namespace

void adam_in_one_pass(const UpdateSpan& span, const OptimizerOptions& optimizer, double gradient_factor, int64_t step) {
  const AdamFactors factors = adam_factors(
      moment_factors(optimizer.beta1, optimizer.beta2, optimizer.eps, gradient_factor, static_cast<double>(step)),
      optimizer.lr, optimizer.weight_decay, optimizer.kind == OptimizerKind::kAdamW);
  if (span.weights.scalar_type() == at::kHalf) return update_weights<Float16>(span, factors);
  TRIREME_CHECK(span.weights.scalar_type() == at::kBFloat16, "16-bit weights expected, got ",
                at::toString(span.weights.scalar_type()));
  update_weights<BFloat16>(span, factors);
}

}  // namespace trireme
