#include "observe/curves.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace trireme {

std::vector<double> smoothed_losses(const std::vector<StepMetrics>& steps) {
  const double keep = std::clamp(1 - 60 / static_cast<double>(steps.size() + 1), 0.8, 0.98);
  std::vector<double> smooth;
  double sum = 0, weight = 0;
  for (const auto& step : steps) {
    if (step.loss && std::isfinite(*step.loss)) {
      sum = keep * sum + (1 - keep) * *step.loss;
      weight = keep * weight + (1 - keep);
    }
    smooth.push_back(weight > 0 ? sum / weight : std::numeric_limits<double>::quiet_NaN());
  }
  return smooth;
}

std::vector<size_t> thinned(const std::vector<StepMetrics>& steps, size_t points) {
  std::vector<size_t> kept;
  const size_t buckets = steps.size() <= points ? steps.size() : points / 2;
  // A value that is not finite counts as largest: it is what one looks for.
  const auto rank = [&](size_t i) {
    const double loss = steps[i].loss.value_or(0);
    return std::isfinite(loss) ? loss : std::numeric_limits<double>::infinity();
  };
  for (size_t bucket = 0; bucket < buckets; ++bucket) {
    const size_t begin = bucket * steps.size() / buckets, end = (bucket + 1) * steps.size() / buckets;
    size_t low = begin, high = begin;
    for (size_t i = begin; i < end; ++i) {
      if (rank(i) < rank(low)) low = i;
      if (rank(i) > rank(high)) high = i;
    }
    kept.push_back(std::min(low, high));
    if (low != high) kept.push_back(std::max(low, high));
  }
  if (!steps.empty() && kept.back() != steps.size() - 1) {
    if (kept.size() >= points) kept.pop_back();
    kept.push_back(steps.size() - 1);
  }
  return kept;
}

std::vector<MeasuredPoint> measured_memory_mib(const std::vector<StepMetrics>& steps, size_t points) {
  constexpr double kMiB = 1024.0 * 1024.0;
  std::vector<MeasuredPoint> measured, kept;
  for (const StepMetrics& step : steps)
    if (step.memory.pss_bytes > 0) measured.push_back({step.step, static_cast<double>(step.memory.pss_bytes) / kMiB});
  const size_t buckets = std::min(measured.size(), points);
  const auto at = [&](size_t bucket) {
    return measured.begin() + static_cast<std::ptrdiff_t>(bucket * measured.size() / buckets);
  };
  for (size_t bucket = 0; bucket < buckets; ++bucket)
    kept.push_back(
        *std::max_element(at(bucket), at(bucket + 1), [](const auto& a, const auto& b) { return a.value < b.value; }));
  return kept;
}

}  // namespace trireme
