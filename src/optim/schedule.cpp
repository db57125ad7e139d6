#include "trireme/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "trireme/base/error.h"

namespace trireme {

namespace {

bool needs_total(ScheduleKind kind) {
  return kind == ScheduleKind::kWarmupDecay || kind == ScheduleKind::kWarmupCosine;
}

void check(const ScheduleOptions& options) {
  const char* name = name_of(options.kind);
  if (options.warmup_num_steps < 0)
    throw ConfigError(str("scheduler.params.warmup_num_steps=", options.warmup_num_steps, " is negative; ", name,
                          " needs 0 or more"));
  if (needs_total(options.kind) && options.total_num_steps <= 0)
    throw ConfigError(str("scheduler.params.total_num_steps=", options.total_num_steps, ": ", name,
                          " needs the number of steps of the whole training, 1 or more"));
  if (options.warmup_min_lr < 0)
    throw ConfigError(str("scheduler.params.warmup_min_lr=", options.warmup_min_lr, " is negative; use 0 or more"));
  if (options.warmup_max_lr < 0 && options.warmup_max_lr != ScheduleOptions::kOptimizerLr)
    throw ConfigError(str("scheduler.params.warmup_max_lr=", options.warmup_max_lr, " is negative; use 0 or more"));
}

}  // namespace

const char* name_of(ScheduleKind kind) noexcept {
  switch (kind) {
    case ScheduleKind::kConstant:
      return "constant";
    case ScheduleKind::kWarmup:
      return "WarmupLR";
    case ScheduleKind::kWarmupDecay:
      return "WarmupDecayLR";
    case ScheduleKind::kWarmupCosine:
      return "WarmupCosineLR";
  }
  return "unknown";
}

Schedule::Schedule(const ScheduleOptions& options, double optimizer_lr)
    : options_(options), optimizer_lr_(optimizer_lr) {
  check(options);
  options_.warmup_num_steps = std::max<int64_t>(2, options.warmup_num_steps);
  if (options.warmup_max_lr == ScheduleOptions::kOptimizerLr) options_.warmup_max_lr = optimizer_lr;
}

double Schedule::warmup_ratio(int64_t iteration) const {
  const auto steps = static_cast<double>(options_.warmup_num_steps);
  const auto i = static_cast<double>(iteration);
  return options_.warmup_type == WarmupKind::kLog ? std::log(i + 1) / std::log(steps) : i / steps;
}

double Schedule::lr(int64_t applied_steps) const {
  if (options_.kind == ScheduleKind::kConstant) return optimizer_lr_;
  const int64_t i = std::max<int64_t>(applied_steps - 1, 0);
  const int64_t warmup = options_.warmup_num_steps;
  const auto after_warmup = static_cast<double>(std::max<int64_t>(1, options_.total_num_steps - warmup));

  if (options_.kind == ScheduleKind::kWarmupCosine) {
    if (i < warmup)
      return optimizer_lr_ * (options_.warmup_min_ratio + (1 - options_.warmup_min_ratio) * warmup_ratio(i));
    // Past the end the cosine would rise again.
    const double done = std::min(1.0, static_cast<double>(i - warmup + 1) / after_warmup);
    const double wave = (1 + std::cos(std::numbers::pi * done)) / 2;
    return optimizer_lr_ * (options_.cos_min_ratio + (1 - options_.cos_min_ratio) * wave);
  }

  const double low = options_.warmup_min_lr;
  const double span = options_.warmup_max_lr - low;
  if (i < warmup) return low + span * warmup_ratio(i);
  if (options_.kind == ScheduleKind::kWarmup) return options_.warmup_max_lr;
  return low + span * std::max(0.0, static_cast<double>(options_.total_num_steps - i) / after_warmup);
}

}  // namespace trireme
