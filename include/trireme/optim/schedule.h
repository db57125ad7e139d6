// Learning-rate schedules: pure functions of how many steps were applied.
#pragma once

#include <cstdint>

namespace trireme {

enum class ScheduleKind { kConstant, kWarmup, kWarmupDecay, kWarmupCosine };
enum class WarmupKind { kLog, kLinear };

/// Names and defaults are DeepSpeed's.
struct ScheduleOptions {
  ScheduleKind kind = ScheduleKind::kConstant;
  double warmup_min_lr = 0;             ///< WarmupLR, WarmupDecayLR
  double warmup_max_lr = kOptimizerLr;  ///< WarmupLR, WarmupDecayLR
  int64_t warmup_num_steps = 1000;      ///< raised to 2, so that the logarithm of the warm-up is never zero
  WarmupKind warmup_type = WarmupKind::kLog;
  int64_t total_num_steps = 0;  ///< WarmupDecayLR, WarmupCosineLR: required there
  double warmup_min_ratio = 0;  ///< WarmupCosineLR: first learning rate over the optimizer's
  double cos_min_ratio = 1e-4;  ///< WarmupCosineLR: last learning rate over the optimizer's

  /// Stands for "the optimizer's lr".
  static constexpr double kOptimizerLr = -1;
  bool operator==(const ScheduleOptions&) const = default;
};

/// "WarmupLR", …; "constant" for none.
const char* name_of(ScheduleKind kind) noexcept;

/// Source    DeepSpeed's WarmupLR, WarmupDecayLR and WarmupCosineLR. Test: schedule_test.cpp.
class Schedule {
 public:
  /// Throws    ConfigError: a number of steps that is missing or negative, a learning rate below zero.
  Schedule(const ScheduleOptions& options, double optimizer_lr);

  /// The learning rate for the next step after `applied_steps` steps changed the weights (skipped ones do not count).
  ///
  /// As there, the schedule advances after a step, so steps 1 and 2 both use the start of the warm-up:
  /// with i = max(applied_steps - 1, 0) and w = warmup_num_steps,
  ///   i < w: min + (max - min) * (ln(i + 1) / ln(w), or i / w)
  ///   then   WarmupLR max; WarmupDecayLR min + (max - min) * (total - i) / (total - w), at least min;
  ///          WarmupCosineLR lr * (c + (1 - c) * (1 + cos(pi * (i - w + 1) / (total - w))) / 2), c after the end.
  double lr(int64_t applied_steps) const;

  const ScheduleOptions& options() const { return options_; }

 private:
  double warmup_ratio(int64_t iteration) const;

  ScheduleOptions options_;
  double optimizer_lr_;
};

}  // namespace trireme
