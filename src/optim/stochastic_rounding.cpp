#include "optim/stochastic_rounding.h"

#include <ATen/core/PhiloxRNGEngine.h>
#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

#include "optim/grain.h"
#include "trireme/base/parallel.h"

namespace trireme {
namespace {

constexpr int kRounds = 7;  // the fewest with which Philox 4x32 passes BigCrush, doi:10.1145/2063384.2063405
constexpr int kBits = 16;   // of fp32 that bf16 has not
constexpr int64_t kHalvesOfNumber = 128 / kBits;  // random numbers of 128 bits

at::BFloat16 rounded(float value, uint32_t noise) {
  if (!std::isfinite(value)) return {value};
  return {static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + noise) >> kBits), at::BFloat16::from_bits()};
}

/// The elements of one parameter from `first` on.
void round_elements(at::BFloat16* to, const float* from, int64_t numel, uint64_t seed, int64_t first) {
  at::Philox4_32 engine(seed, /*subsequence=*/0, static_cast<uint64_t>(first / kHalvesOfNumber));
  uint32_t number = 0;
  const auto noise_of = [&](int64_t place) {
    if (place % 2 == 0) return (number = engine(kRounds)) & 0xFFFF;
    return number >> kBits;
  };
  for (int64_t before = first % kHalvesOfNumber, place = 0; place < before; ++place) (void)noise_of(place);
  for (int64_t i = 0; i < numel; ++i) to[i] = rounded(from[i], noise_of(first + i));
}

}  // namespace

void StochasticRounding::round(const at::Tensor& to, const at::Tensor& from, int64_t begin, int64_t step,
                               Tensor tensor) const {
  auto* const target = to.data_ptr<at::BFloat16>();
  const float* const values = from.const_data_ptr<float>();
  const int64_t end = begin + to.numel();
  for (const Range& range : ranges_) {
    const int64_t low = std::max(begin, range.begin), high = std::min(end, range.begin + range.numel);
    if (low >= high) continue;
    const uint64_t of_step[] = {range.parameter, static_cast<uint64_t>(step), static_cast<uint64_t>(tensor)};
    const uint64_t seed = XXH3_64bits(of_step, sizeof of_step);
    parallel_for(low, high, kGrain, [&](int64_t from_here, int64_t to_here) {
      round_elements(target + (from_here - begin), values + (from_here - begin), to_here - from_here, seed,
                     range.first + (from_here - range.begin));
    });
  }
}

}  // namespace trireme
