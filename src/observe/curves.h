// The curves of a report as numbers: smoothed over all steps, then thinned to what a screen can show.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "trireme/observe/metrics.h"

namespace trireme {

/// Points per curve that are kept: more than a wide chart has pixels.
inline constexpr size_t kCurvePoints = 3000;

/// Exponential mean of the losses, corrected for its beginning; a loss that is not finite leaves it as it is.
/// The weight of the past grows with the run's length, from 0.8 to 0.98.
std::vector<double> smoothed_losses(const std::vector<StepMetrics>& steps);

/// Indices of at most `points` steps, ascending: of every bucket those with the smallest and the largest loss, so that
/// a spike stays visible, and the last step. All of them when there are no more.
std::vector<size_t> thinned(const std::vector<StepMetrics>& steps, size_t points);

/// A value that was measured in step `step`.
struct MeasuredPoint {
  int64_t step = 0;
  double value = 0;
};

/// The largest rank's memory in MiB of the steps in which it was measured, at most `points`: of every bucket the
/// largest.
std::vector<MeasuredPoint> measured_memory_mib(const std::vector<StepMetrics>& steps, size_t points);

}  // namespace trireme
