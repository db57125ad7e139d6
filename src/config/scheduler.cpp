#include <algorithm>
#include <cmath>

#include "config/read_parts.h"
#include "config/read_type.h"
#include "trireme/config/torch_scheduler.h"

namespace trireme {
namespace {

constexpr ScheduleKind kKinds[] = {ScheduleKind::kWarmup,      ScheduleKind::kWarmupDecay, ScheduleKind::kWarmupCosine,
                                   ScheduleKind::kLrRangeTest, ScheduleKind::kOneCycle,    ScheduleKind::kConstant,
                                   ScheduleKind::kLinear,      ScheduleKind::kCosine,      ScheduleKind::kWsd};
const std::vector<std::string> kTorchSchedulers = {
    "LambdaLR",         "MultiplicativeLR",  "StepLR",
    "MultiStepLR",      "ConstantLR",        "LinearLR",
    "ExponentialLR",    "CosineAnnealingLR", "CosineAnnealingWarmRestarts",
    "ChainedScheduler", "SequentialLR",      "ReduceLROnPlateau",
    "CyclicLR",         "OneCycleLR",        "PolynomialLR"};

std::vector<std::string> names_of_schedulers() {
  std::vector<std::string> names;
  for (const ScheduleKind kind : kKinds) names.emplace_back(name_of(kind));
  return names;
}

/// Schedulers start with the run; their position is part of a checkpoint.
void refuse_another_start(Section& params) {
  if (params.integer_or("last_batch_iteration", -1, {}) != -1)
    params.not_there_yet("last_batch_iteration", "a checkpoint holds the position; remove it");
}

/// A number, or a list with one for each parameter group.
PerGroup read_per_group(Section& params, const char* key, PerGroup fallback) {
  const Json* json = params.value(key);
  if (!json || !json->is_array()) {
    if (json) return params.number_or(key, 0, kNonNegative);
    return fallback;
  }
  const auto fits = [](const Json& one) { return one.is_number() && one >= 0.0 && std::isfinite(one.get<double>()); };
  if (json->empty() || !std::all_of(json->begin(), json->end(), fits))
    params.fail(key, "a finite number >= 0, or a list of them, one for each parameter group");
  return json->get<std::vector<double>>();
}

PerGroup required_lr(Section& params, const char* key) {
  if (!params.has(key))
    params.refuse(str("`", params.path_of(key), "` is missing; set it to a learning rate, a finite number >= 0"));
  return read_per_group(params, key, 0.0);
}

int64_t read_total_steps(Section& params) {
  const char* key = "total_num_steps";
  if (!params.has(key))
    params.refuse(str("`", params.path_of(key),
                      "` is missing, or \"auto\", which only `trireme train` fills in; set it to the number of "
                      "optimizer steps of the whole run"));
  return params.integer_or(key, 0, kPositive);
}

void read_warmup(Section& params, ScheduleOptions& options) {
  options.warmup_num_steps = params.integer_or("warmup_num_steps", options.warmup_num_steps, kCount);
  const std::string warmup = params.choice_or("warmup_type", "log", {"log", "linear"});
  options.warmup_type = warmup == "log" ? WarmupKind::kLog : WarmupKind::kLinear;
  if (options.kind == ScheduleKind::kWarmupCosine) {
    options.total_num_steps = read_total_steps(params);
    options.warmup_min_ratio = params.number_or("warmup_min_ratio", options.warmup_min_ratio, kNonNegative);
    options.cos_min_ratio = params.number_or("cos_min_ratio", options.cos_min_ratio, kNonNegative);
    return;
  }
  const bool decays = options.kind == ScheduleKind::kWarmupDecay;
  if (decays) options.total_num_steps = read_total_steps(params);
  options.warmup_min_lr = read_per_group(params, "warmup_min_lr", options.warmup_min_lr);
  // "auto" is what integrations write for "the optimizer's lr".
  const bool from_optimizer = !decays || params.is_auto("warmup_max_lr");
  options.warmup_max_lr =
      read_per_group(params, "warmup_max_lr", from_optimizer ? ScheduleOptions::kOptimizerLr : 0.001);
}

void read_own(Section& params, ScheduleOptions& options) {
  options.warmup_num_steps = params.integer_or("warmup_num_steps", options.warmup_num_steps, kCount);
  options.total_num_steps = read_total_steps(params);
  options.min_ratio = params.number_or("min_ratio", options.min_ratio, kNonNegative);
  if (options.kind == ScheduleKind::kWsd)
    options.decay_num_steps = params.integer_or("decay_num_steps", options.decay_num_steps, kCount);
}

void read_range_test(Section& params, LrRangeTestOptions& options) {
  options.min_lr = read_per_group(params, "lr_range_test_min_lr", options.min_lr);
  options.step_size = params.integer_or("lr_range_test_step_size", options.step_size, kPositive);
  options.step_rate = params.number_or("lr_range_test_step_rate", options.step_rate, kNonNegative);
  options.staircase = params.flag_or("lr_range_test_staircase", options.staircase);
}

void read_one_cycle(Section& params, OneCycleOptions& options) {
  options.cycle_min_lr = required_lr(params, "cycle_min_lr");
  options.cycle_max_lr = required_lr(params, "cycle_max_lr");
  options.decay_lr_rate = params.number_or("decay_lr_rate", options.decay_lr_rate, kNonNegative);
  options.cycle_first_step_size = params.integer_or("cycle_first_step_size", options.cycle_first_step_size, kPositive);
  if (params.has("cycle_second_step_size"))
    options.cycle_second_step_size = params.integer_or("cycle_second_step_size", 0, kCount);
  options.cycle_first_stair_count = params.integer_or("cycle_first_stair_count", 0, kCount);
  if (params.has("cycle_second_stair_count"))
    options.cycle_second_stair_count = params.integer_or("cycle_second_stair_count", 0, kCount);
  options.decay_step_size = params.integer_or("decay_step_size", options.decay_step_size, kCount);
  options.cycle_momentum = params.flag_or("cycle_momentum", options.cycle_momentum);
  options.cycle_min_mom = read_per_group(params, "cycle_min_mom", options.cycle_min_mom);
  options.cycle_max_mom = read_per_group(params, "cycle_max_mom", options.cycle_max_mom);
  options.decay_mom_rate = params.number_or("decay_mom_rate", options.decay_mom_rate, kNonNegative);
}

/// What the schedule itself refuses: parameters that do not fit together.
void check_together(Section& params, const ScheduleOptions& options) {
  const OneCycleOptions& cycle = options.one_cycle;
  const PerGroup* lists[] = {&options.warmup_min_lr, &options.warmup_max_lr, &options.lr_range_test.min_lr,
                             &cycle.cycle_min_lr,    &cycle.cycle_max_lr,    &cycle.cycle_min_mom,
                             &cycle.cycle_max_mom};
  size_t groups = 1;  // how many there are is not known yet
  for (const PerGroup* list : lists) groups = std::max(groups, list->values.size());
  try {
    (void)Schedule(options, std::vector<double>(groups, 0.0));
  } catch (const ConfigError& error) {
    params.refuse(error.what());
  }
}

}  // namespace

std::optional<Json> take_torch_scheduler(Json& config) {
  const auto section = config.is_object() ? config.find("scheduler") : config.end();
  if (section == config.end() || !section->is_object()) return std::nullopt;
  const Json type = section->value("type", Json());
  // As Python's initialize(): names of torch's classes, letter by letter.
  if (!type.is_string() ||
      std::find(kTorchSchedulers.begin(), kTorchSchedulers.end(), type.get<std::string>()) == kTorchSchedulers.end())
    return std::nullopt;
  Json taken = *section;
  config.erase(section);
  return taken;
}

std::optional<ScheduleOptions> read_scheduler(Section& top) {
  if (!top.has("scheduler")) return std::nullopt;
  Section section = top.section("scheduler");
  const std::string type =
      read_type(section, {.supported = names_of_schedulers(),
                          .not_there_yet = kTorchSchedulers,
                          .others = ", or in Python a scheduler of torch.optim.lr_scheduler",
                          .instead = "initialize() in Python makes it of torch.optim.lr_scheduler; in C++ "});
  Section params = section.section("params");
  section.finish();

  ScheduleOptions options;
  for (const ScheduleKind kind : kKinds)
    if (type == name_of(kind)) options.kind = kind;
  switch (options.kind) {
    case ScheduleKind::kConstant:
      break;
    case ScheduleKind::kLinear:
    case ScheduleKind::kCosine:
    case ScheduleKind::kWsd:
      read_own(params, options);
      break;
    case ScheduleKind::kLrRangeTest:
      read_range_test(params, options.lr_range_test);
      break;
    case ScheduleKind::kOneCycle:
      read_one_cycle(params, options.one_cycle);
      break;
    case ScheduleKind::kWarmup:
    case ScheduleKind::kWarmupDecay:
    case ScheduleKind::kWarmupCosine:
      read_warmup(params, options);
      break;
  }
  if (options.kind != ScheduleKind::kConstant) refuse_another_start(params);
  params.finish();
  check_together(params, options);
  return options;
}

}  // namespace trireme
