// Times of variants that take turns: one value for each round.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <utility>
#include <vector>

namespace benchmarks {

template <class Act>
double ns_per_call(int calls, const Act& act) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) act();
  return std::chrono::duration<double, std::nano>(Clock::now() - start).count() / calls;
}

inline double median_of(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

struct Times {
  const char* name;
  std::vector<double> ns;  // one per round
  double min() const { return *std::min_element(ns.begin(), ns.end()); }
  double median() const { return median_of(ns); }
  /// The median of what each round took more than the same round of `other`: rounds differ as the host's speed does.
  double more_than(const Times& other) const {
    std::vector<double> differences(ns.size());
    std::transform(ns.begin(), ns.end(), other.ns.begin(), differences.begin(), std::minus<>());
    return median_of(std::move(differences));
  }
};

inline void print(const Times& times) { std::printf("  %-52s %9.0f %9.0f\n", times.name, times.min(), times.median()); }

}  // namespace benchmarks
