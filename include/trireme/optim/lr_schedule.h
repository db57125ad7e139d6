// Learning-rate schedules: pure functions of how many steps were applied.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace trireme {

/// The schedules, by name_of().
enum class LrScheduleKind {
  kConstant,
  kLinear,
  kCosine,
  kWsd,  ///< warm-up, stable, decay
  kLrRangeTest,
  kOneCycle,
  kWarmup,
  kWarmupDecay,
  kWarmupCosine
};
/// The form of the warm-up.
enum class WarmupKind { kLog, kLinear };

/// One value for all parameter groups, or one for each.
struct PerGroup {
  PerGroup(double value) : values{value} {}  // NOLINT(google-explicit-constructor): a number is the usual case
  PerGroup(std::vector<double> each) : values(std::move(each)) {}  // NOLINT(google-explicit-constructor)
  double operator[](size_t group) const { return values.size() == 1 ? values[0] : values.at(group); }
  bool operator==(const PerGroup&) const = default;

  std::vector<double> values;
};

/// Parameters of LRRangeTest, without the prefix `lr_range_test_`.
struct LrRangeTestOptions {
  PerGroup min_lr = 1e-3;
  int64_t step_size = 2000;
  double step_rate = 1;
  bool staircase = false;
  bool operator==(const LrRangeTestOptions&) const = default;
};

/// Parameters of OneCycle.
struct OneCycleOptions {
  PerGroup cycle_min_lr = 0.0;  ///< required, as cycle_max_lr
  PerGroup cycle_max_lr = 0.0;
  double decay_lr_rate = 0;
  int64_t cycle_first_step_size = 2000;
  std::optional<int64_t> cycle_second_step_size = {};  ///< nothing: as the first; 0: the cycle ends at its top
  int64_t cycle_first_stair_count = 0;                 ///< 0: no stairs
  std::optional<int64_t> cycle_second_stair_count = {};
  int64_t decay_step_size = 0;  ///< 0: no decay after the cycle
  bool cycle_momentum = true;
  PerGroup cycle_min_mom = 0.8;
  PerGroup cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
  bool operator==(const OneCycleOptions&) const = default;
};

/// Names and defaults are DeepSpeed's; "linear", "cosine" and "wsd" are our own.
struct LrScheduleOptions {
  LrScheduleKind kind = LrScheduleKind::kConstant;
  PerGroup warmup_min_lr = 0.0;           ///< WarmupLR, WarmupDecayLR
  PerGroup warmup_max_lr = kOptimizerLr;  ///< WarmupLR, WarmupDecayLR
  int64_t warmup_num_steps = 1000;        ///< DeepSpeed's schedules use at least 2, so that the logarithm is not zero
  WarmupKind warmup_type = WarmupKind::kLog;
  int64_t total_num_steps = 0;  ///< WarmupDecayLR, WarmupCosineLR, linear, cosine, wsd: required there
  double warmup_min_ratio = 0;  ///< WarmupCosineLR: first learning rate, as a share of the optimizer's
  double cos_min_ratio = 1e-4;  ///< WarmupCosineLR: last learning rate, likewise
  int64_t decay_num_steps = 0;  ///< wsd: length of the decay, the last steps of the run; required
  double min_ratio = 0;         ///< linear, cosine, wsd: last learning rate, likewise
  LrRangeTestOptions lr_range_test = {};
  OneCycleOptions one_cycle = {};

  /// Stands for "the optimizer's lr".
  static constexpr double kOptimizerLr = -1;
  bool operator==(const LrScheduleOptions&) const = default;
};

/// "WarmupLR", …; "constant" for none.
const char* name_of(LrScheduleKind kind) noexcept;

/// Source    DeepSpeed's LRRangeTest, OneCycle (arXiv:1803.09820), WarmupLR, WarmupDecayLR and WarmupCosineLR; wsd
///           arXiv:2404.06395. The formulas are in docs/optim.md. Test: lr_schedule_test.cpp.
class LrSchedule {
 public:
  /// `group_lrs`: the optimizer's lr of each parameter group.
  /// Throws    ConfigError: a parameter out of its range, or not one value per group.
  LrSchedule(const LrScheduleOptions& options, std::vector<double> group_lrs);
  LrSchedule(const LrScheduleOptions& options, double optimizer_lr)
      : LrSchedule(options, std::vector<double>{optimizer_lr}) {}

  /// The learning rate for the next step after `applied_steps` steps changed the weights (skipped ones do not count).
  double lr(int64_t applied_steps, size_t group = 0) const;
  /// Likewise beta1, or the momentum of an optimizer without betas. Nothing: the schedule does not change it.
  std::optional<double> momentum(int64_t applied_steps, size_t group = 0) const;
  /// beta2 wherever momentum() has a value.
  static constexpr double kCycleBeta2 = 0.99;

  const LrScheduleOptions& options() const { return options_; }

 private:
  LrScheduleOptions options_;
  std::vector<double> group_lrs_;
};

}  // namespace trireme
