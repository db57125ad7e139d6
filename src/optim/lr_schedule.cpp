#include "trireme/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "optim/lr_schedule_check.h"

namespace trireme {

namespace {

// The upper limit of OneCycle's growing momentum: from 1 on a moment would never forget.
constexpr double kLargestMomentum = 0.9999;

double half_wave(double done) { return (1 + std::cos(std::numbers::pi * done)) / 2; }

/// How much of the optimizer's lr: linear, cosine and wsd after `applied` steps.
double own_factor(const LrScheduleOptions& options, int64_t applied) {
  const int64_t warmup = options.warmup_num_steps, total = options.total_num_steps;
  if (applied < warmup) return static_cast<double>(applied + 1) / static_cast<double>(warmup + 1);
  const int64_t start = options.kind == LrScheduleKind::kWsd ? total - options.decay_num_steps : warmup;
  const auto length = static_cast<double>(std::max<int64_t>(1, total - start));
  const double done = std::clamp(static_cast<double>(applied - start) / length, 0.0, 1.0);
  const double left = options.kind == LrScheduleKind::kCosine ? half_wave(done) : 1 - done;
  return options.min_ratio + (1 - options.min_ratio) * left;
}

double range_test_factor(const LrRangeTestOptions& options, int64_t applied) {
  const double interval = static_cast<double>(applied) / static_cast<double>(options.step_size);
  return 1 + options.step_rate * (options.staircase ? std::floor(interval) : interval);
}

struct CyclePosition {
  double height = 0;           ///< 0 at the ends of the cycle, 1 at its top
  double decay_intervals = 0;  ///< since its end
};

CyclePosition cycle_position(const OneCycleOptions& options, int64_t applied) {
  const int64_t first = options.cycle_first_step_size, second = options.cycle_second_step_size.value_or(first);
  const int64_t past = applied - first - second;
  if (past >= 0) {
    const bool decays = options.decay_step_size > 0;
    return {0, decays ? static_cast<double>(past) / static_cast<double>(options.decay_step_size) : 0};
  }
  const bool rises = applied <= first;
  const auto part = static_cast<double>(rises ? applied : first + second - applied);
  const auto whole = static_cast<double>(rises ? first : second);
  const auto stairs =
      static_cast<double>(rises ? options.cycle_first_stair_count
                                : options.cycle_second_stair_count.value_or(options.cycle_first_stair_count));
  return {stairs > 0 ? std::floor(part * stairs / whole) / stairs : part / whole, 0};
}

double cycle_lr(const OneCycleOptions& options, int64_t applied, size_t group) {
  const auto [height, decay_intervals] = cycle_position(options, applied);
  const double low = options.cycle_min_lr[group];
  const double lr = low + (options.cycle_max_lr[group] - low) * height;
  return lr / (1 + options.decay_lr_rate * decay_intervals);
}

// DeepSpeed's schedules advance after a step: steps 1 and 2 both use the start of a warm-up.
int64_t iteration_of(int64_t applied) { return std::max<int64_t>(applied - 1, 0); }

double warmup_ratio(const LrScheduleOptions& options, int64_t iteration) {
  const auto steps = static_cast<double>(options.warmup_num_steps);
  const auto i = static_cast<double>(iteration);
  return options.warmup_type == WarmupKind::kLog ? std::log(i + 1) / std::log(steps) : i / steps;
}

double steps_after_warmup(const LrScheduleOptions& options) {
  return static_cast<double>(std::max<int64_t>(1, options.total_num_steps - options.warmup_num_steps));
}

double warmup_cosine_factor(const LrScheduleOptions& options, int64_t applied) {
  const int64_t i = iteration_of(applied), warmup = options.warmup_num_steps;
  if (i < warmup) return options.warmup_min_ratio + (1 - options.warmup_min_ratio) * warmup_ratio(options, i);
  // Past the end the cosine would rise again.
  const double done = std::min(1.0, static_cast<double>(i - warmup + 1) / steps_after_warmup(options));
  return options.cos_min_ratio + (1 - options.cos_min_ratio) * half_wave(done);
}

/// WarmupLR and WarmupDecayLR, from `low` to `high` and, for the latter, back.
double warmup_lr(const LrScheduleOptions& options, int64_t applied, double low, double high) {
  const int64_t i = iteration_of(applied);
  const double span = high - low;
  if (i < options.warmup_num_steps) return low + span * warmup_ratio(options, i);
  if (options.kind == LrScheduleKind::kWarmup) return high;
  return low + span * std::max(0.0, static_cast<double>(options.total_num_steps - i) / steps_after_warmup(options));
}

}  // namespace

const char* name_of(LrScheduleKind kind) noexcept {
  switch (kind) {
    case LrScheduleKind::kConstant:
      return "constant";
    case LrScheduleKind::kLinear:
      return "linear";
    case LrScheduleKind::kCosine:
      return "cosine";
    case LrScheduleKind::kWsd:
      return "wsd";
    case LrScheduleKind::kLrRangeTest:
      return "LRRangeTest";
    case LrScheduleKind::kOneCycle:
      return "OneCycle";
    case LrScheduleKind::kWarmup:
      return "WarmupLR";
    case LrScheduleKind::kWarmupDecay:
      return "WarmupDecayLR";
    case LrScheduleKind::kWarmupCosine:
      return "WarmupCosineLR";
  }
  return "unknown";
}

LrSchedule::LrSchedule(const LrScheduleOptions& options, std::vector<double> group_lrs)
    : options_(options), group_lrs_(std::move(group_lrs)) {
  check_schedule(options, group_lrs_.size());
  const bool is_deep_speeds = options.kind == LrScheduleKind::kWarmup || options.kind == LrScheduleKind::kWarmupDecay ||
                              options.kind == LrScheduleKind::kWarmupCosine;
  if (is_deep_speeds) options_.warmup_num_steps = std::max<int64_t>(2, options.warmup_num_steps);
}

double LrSchedule::lr(int64_t applied_steps, size_t group) const {
  const double own = group_lrs_.at(group);
  switch (options_.kind) {
    case LrScheduleKind::kConstant:
      return own;
    case LrScheduleKind::kLinear:
    case LrScheduleKind::kCosine:
    case LrScheduleKind::kWsd:
      return own * own_factor(options_, applied_steps);
    case LrScheduleKind::kLrRangeTest:
      return options_.lr_range_test.min_lr[group] * range_test_factor(options_.lr_range_test, applied_steps);
    case LrScheduleKind::kOneCycle:
      return cycle_lr(options_.one_cycle, applied_steps, group);
    case LrScheduleKind::kWarmupCosine:
      return own * warmup_cosine_factor(options_, applied_steps);
    case LrScheduleKind::kWarmup:
    case LrScheduleKind::kWarmupDecay: {
      const double high = options_.warmup_max_lr[group];
      return warmup_lr(options_, applied_steps, options_.warmup_min_lr[group],
                       high == LrScheduleOptions::kOptimizerLr ? own : high);
    }
  }
  return own;
}

std::optional<double> LrSchedule::momentum(int64_t applied_steps, size_t group) const {
  const OneCycleOptions& cycle = options_.one_cycle;
  if (options_.kind != LrScheduleKind::kOneCycle || !cycle.cycle_momentum) return std::nullopt;
  const auto [height, decay_intervals] = cycle_position(cycle, applied_steps);
  const double high = cycle.cycle_max_mom[group];
  const double momentum = high - (high - cycle.cycle_min_mom[group]) * height;
  return std::min(kLargestMomentum, momentum * (1 + cycle.decay_mom_rate * decay_intervals));
}

}  // namespace trireme
