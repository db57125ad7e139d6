// One element of Adam and AdamW with 16-bit weights, for two compilers: the host's, and NVRTC when a GPU is used. Both
// round alike, so that a GPU does what the tests see on the host.
#pragma once

#include "optim/moments.h"

#ifdef __CUDACC_RTC__
namespace trireme {

struct BFloat16 {
  unsigned short bits;
};
struct Float16 {
  unsigned short bits;
};

inline float widen(float value) { return value; }
inline float widen(BFloat16 value) { return __uint_as_float(static_cast<unsigned>(value.bits) << 16); }
inline float widen(Float16 value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
  return wide;
}

template <class T>
T narrow(float value);
/// As trireme/base/float16.h.
template <>
inline BFloat16 narrow<BFloat16>(float value) {
  const unsigned bits = __float_as_uint(value);
  const unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {static_cast<unsigned short>(value != value ? 0x7fc0 : rounded)};
}
template <>
inline Float16 narrow<Float16>(float value) {
  Float16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

}  // namespace trireme
#else
#include "trireme/base/float16.h"
#endif

namespace trireme {

struct AdamFactors {
  MomentFactors moments;
  float step_size, shrink, l2;  // AdamW shrinks the weights, Adam adds its decay to the gradients
};

/// `lr` and `weight_decay` in fp64: what a step shrinks the weights by is near 1.
inline AdamFactors adam_factors(const MomentFactors& moments, double lr, double weight_decay, bool is_decoupled) {
  return {moments, static_cast<float>(lr), static_cast<float>(is_decoupled ? 1 - lr * weight_decay : 1),
          static_cast<float>(is_decoupled ? 0 : weight_decay)};
}

/// Adam's update of one element. `gradient` is not scaled yet.
template <class Weight>
inline void update_adam(float& master, Weight& weight, float gradient, float& first, float& second,
                        const AdamFactors& f) {
  move_moments(f.moments.gradient * gradient + f.l2 * master, first, second, f.moments);
  const float updated = f.shrink * master - f.step_size * moment_ratio(first, second, f.moments);
  master = updated;
  weight = narrow<Weight>(updated);
}

}  // namespace trireme
