#include "optim/lr_schedule_check.h"

#include <cmath>

#include "trireme/base/error.h"

namespace trireme {
namespace {

template <class Value>
[[noreturn]] void refuse(const char* key, const Value& value, const std::string& fix) {
  throw ConfigError(str("scheduler.params.", key, "=", value, ": ", fix));
}

void require_non_negative(const char* key, double value) {
  if (!(value >= 0) || !std::isfinite(value)) refuse(key, value, "use a finite number, 0 or more");
}

void require_one_per_group(const char* key, const PerGroup& values, size_t groups) {
  if (values.values.size() != 1 && values.values.size() != groups)
    throw ConfigError(str("scheduler.params.", key, " has ", values.values.size(), " values for ", groups,
                          " parameter groups; give one number, or one per group"));
}

/// `stand_in` is taken as well.
void require_lrs(const char* key, const PerGroup& lrs, size_t groups, std::optional<double> stand_in = {}) {
  require_one_per_group(key, lrs, groups);
  for (const double lr : lrs.values)
    if (!stand_in || lr != *stand_in) require_non_negative(key, lr);
}

void check_total(const LrScheduleOptions& options) {
  if (options.total_num_steps <= 0)
    refuse("total_num_steps", options.total_num_steps,
           str(name_of(options.kind), " needs the number of steps of the whole training, 1 or more"));
}

void check_warmup(const LrScheduleOptions& options) {
  if (options.warmup_num_steps < 0)
    refuse("warmup_num_steps", options.warmup_num_steps, str(name_of(options.kind), " needs 0 or more"));
}

void check_own(const LrScheduleOptions& options) {
  check_total(options);
  check_warmup(options);
  require_non_negative("min_ratio", options.min_ratio);
  const bool is_wsd = options.kind == LrScheduleKind::kWsd;
  if (is_wsd && options.decay_num_steps < 1)
    refuse("decay_num_steps", options.decay_num_steps, "wsd needs the number of its last, decaying steps, 1 or more");
  const int64_t decay = is_wsd ? options.decay_num_steps : 0;
  if (options.warmup_num_steps + decay > options.total_num_steps)
    refuse("total_num_steps", options.total_num_steps,
           str("warm-up", is_wsd ? " and decay take " : " takes ", options.warmup_num_steps + decay,
               " steps; use fewer, or a larger total"));
}

void check_range_test(const LrRangeTestOptions& options, size_t groups) {
  require_lrs("lr_range_test_min_lr", options.min_lr, groups);
  require_non_negative("lr_range_test_step_rate", options.step_rate);
  if (options.step_size < 1) refuse("lr_range_test_step_size", options.step_size, "use 1 or more steps");
}

void require_momenta(const char* key, const PerGroup& momenta, size_t groups) {
  require_one_per_group(key, momenta, groups);
  for (const double value : momenta.values)
    if (!(value >= 0 && value < 1)) refuse(key, value, "use 0 <= momentum < 1");
}

void check_cycle(const OneCycleOptions& options, size_t groups) {
  require_lrs("cycle_min_lr", options.cycle_min_lr, groups);
  require_lrs("cycle_max_lr", options.cycle_max_lr, groups);
  require_momenta("cycle_min_mom", options.cycle_min_mom, groups);
  require_momenta("cycle_max_mom", options.cycle_max_mom, groups);
  for (size_t group = 0; group < groups; ++group) {
    if (options.cycle_max_lr[group] < options.cycle_min_lr[group])
      refuse("cycle_max_lr", options.cycle_max_lr[group],
             str("use cycle_min_lr=", options.cycle_min_lr[group], " or more"));
    if (options.cycle_max_mom[group] < options.cycle_min_mom[group])
      refuse("cycle_max_mom", options.cycle_max_mom[group],
             str("use cycle_min_mom=", options.cycle_min_mom[group], " or more"));
  }
  require_non_negative("decay_lr_rate", options.decay_lr_rate);
  require_non_negative("decay_mom_rate", options.decay_mom_rate);
  if (options.cycle_first_step_size < 1)
    refuse("cycle_first_step_size", options.cycle_first_step_size, "use 1 or more steps");
  if (options.cycle_second_step_size.value_or(0) < 0)
    refuse("cycle_second_step_size", *options.cycle_second_step_size, "use 0 for none, or more steps");
  if (options.cycle_first_stair_count < 0)
    refuse("cycle_first_stair_count", options.cycle_first_stair_count, "use 0 for none, or more");
  if (options.cycle_second_stair_count.value_or(0) < 0)
    refuse("cycle_second_stair_count", *options.cycle_second_stair_count, "use 0 for none, or more");
  if (options.decay_step_size < 0) refuse("decay_step_size", options.decay_step_size, "use 0 for no decay, or more");
}

}  // namespace

void check_schedule(const LrScheduleOptions& options, size_t groups) {
  switch (options.kind) {
    case LrScheduleKind::kConstant:
      return;
    case LrScheduleKind::kLinear:
    case LrScheduleKind::kCosine:
    case LrScheduleKind::kWsd:
      return check_own(options);
    case LrScheduleKind::kLrRangeTest:
      return check_range_test(options.lr_range_test, groups);
    case LrScheduleKind::kOneCycle:
      return check_cycle(options.one_cycle, groups);
    case LrScheduleKind::kWarmupCosine:
      check_total(options);
      require_non_negative("warmup_min_ratio", options.warmup_min_ratio);
      require_non_negative("cos_min_ratio", options.cos_min_ratio);
      return check_warmup(options);
    case LrScheduleKind::kWarmupDecay:
      check_total(options);
      [[fallthrough]];
    case LrScheduleKind::kWarmup:
      check_warmup(options);
      require_lrs("warmup_min_lr", options.warmup_min_lr, groups);
      require_lrs("warmup_max_lr", options.warmup_max_lr, groups, LrScheduleOptions::kOptimizerLr);
  }
}

}  // namespace trireme
