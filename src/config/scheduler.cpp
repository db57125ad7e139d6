#include "config/read_parts.h"
#include "config/read_type.h"

namespace trireme {
namespace {

const std::vector<std::string> kSchedulers = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "constant"};
// DeepSpeed's own, then torch.optim.lr_scheduler's.
const std::vector<std::string> kSchedulersNotThereYet = {"LRRangeTest",
                                                         "OneCycle",
                                                         "LambdaLR",
                                                         "MultiplicativeLR",
                                                         "StepLR",
                                                         "MultiStepLR",
                                                         "ConstantLR",
                                                         "LinearLR",
                                                         "ExponentialLR",
                                                         "CosineAnnealingLR",
                                                         "CosineAnnealingWarmRestarts",
                                                         "ChainedScheduler",
                                                         "SequentialLR",
                                                         "ReduceLROnPlateau",
                                                         "CyclicLR",
                                                         "OneCycleLR",
                                                         "PolynomialLR"};

/// Schedulers start with the run; their position is part of a checkpoint.
void refuse_another_start(Section& params) {
  if (params.integer_or("last_batch_iteration", -1, {}) != -1)
    params.not_there_yet("last_batch_iteration", "a checkpoint holds the position; remove it");
}

double read_max_lr(Section& params, double fallback) {
  // "auto" is what integrations write for "the optimizer's lr".
  if (params.is_auto("warmup_max_lr")) return ScheduleOptions::kOptimizerLr;
  return params.number_or("warmup_max_lr", fallback, kNonNegative);
}

int64_t read_total_steps(Section& params) {
  const char* key = "total_num_steps";
  if (!params.has(key))
    params.refuse(str("`", params.path_of(key),
                      "` is missing, or \"auto\", which only `trireme train` fills in; set it to the number of "
                      "optimizer steps of the whole run"));
  return params.integer_or(key, 0, kPositive);
}

}  // namespace

std::optional<ScheduleOptions> read_scheduler(Section& top) {
  if (!top.has("scheduler")) return std::nullopt;
  Section section = top.section("scheduler");
  const std::string type = read_type(section, kSchedulers, kSchedulersNotThereYet);
  Section params = section.section("params");
  section.finish();

  ScheduleOptions options;
  if (type == "constant") {
    params.finish();
    return options;
  }
  options.warmup_num_steps = params.integer_or("warmup_num_steps", options.warmup_num_steps, kCount);
  const std::string warmup = params.choice_or("warmup_type", "log", {"log", "linear"});
  options.warmup_type = warmup == "log" ? WarmupKind::kLog : WarmupKind::kLinear;
  refuse_another_start(params);
  if (type == "WarmupCosineLR") {
    options.kind = ScheduleKind::kWarmupCosine;
    options.total_num_steps = read_total_steps(params);
    options.warmup_min_ratio = params.number_or("warmup_min_ratio", options.warmup_min_ratio, kNonNegative);
    options.cos_min_ratio = params.number_or("cos_min_ratio", options.cos_min_ratio, kNonNegative);
  } else {
    const bool decays = type == "WarmupDecayLR";
    options.kind = decays ? ScheduleKind::kWarmupDecay : ScheduleKind::kWarmup;
    if (decays) options.total_num_steps = read_total_steps(params);
    options.warmup_min_lr = params.number_or("warmup_min_lr", options.warmup_min_lr, kNonNegative);
    options.warmup_max_lr = read_max_lr(params, decays ? 0.001 : ScheduleOptions::kOptimizerLr);
  }
  params.finish();
  return options;
}

}  // namespace trireme
