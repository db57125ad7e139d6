#include <nlohmann/json.hpp>

#include "trireme/config/config.h"

namespace trireme {
namespace {

Json optimizer_params(const OptimizerOptions& options) {
  const Json betas = Json::array({options.beta1, options.beta2});
  switch (options.kind) {
    case OptimizerKind::kSgd:
      return {{"lr", options.lr},
              {"momentum", options.momentum},
              {"weight_decay", options.weight_decay},
              {"nesterov", options.nesterov}};
    case OptimizerKind::kAdagrad:
      return {{"lr", options.lr}, {"eps", options.eps}, {"weight_decay", options.weight_decay}};
    case OptimizerKind::kLion:
      return {{"lr", options.lr}, {"betas", betas}, {"weight_decay", options.weight_decay}};
    case OptimizerKind::kLamb:
      return {{"lr", options.lr},
              {"betas", betas},
              {"eps", options.eps},
              {"weight_decay", options.weight_decay},
              {"max_coeff", options.max_coeff},
              {"min_coeff", options.min_coeff},
              {"bias_correction", options.bias_correction}};
    case OptimizerKind::kMuon:
      return {{"lr", options.lr},
              {"adam_lr", options.adam_lr.value_or(options.lr)},
              {"momentum", options.momentum},
              {"betas", betas},
              {"eps", options.eps},
              {"weight_decay", options.weight_decay},
              {"ns_steps", options.ns_steps}};
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      return {{"lr", options.lr},
              {"betas", betas},
              {"eps", options.eps},
              {"weight_decay", options.weight_decay},
              {"adam_w_mode", options.kind == OptimizerKind::kAdamW}};
    case OptimizerKind::kClient:
      break;  // has no name in a file
  }
  return Json::object();
}

Json per_group_json(const PerGroup& each) { return each.values.size() == 1 ? Json(each.values[0]) : Json(each.values); }

Json cycle_json(const OneCycleOptions& options) {
  Json params = {{"cycle_min_lr", per_group_json(options.cycle_min_lr)},
                 {"cycle_max_lr", per_group_json(options.cycle_max_lr)},
                 {"decay_lr_rate", options.decay_lr_rate},
                 {"cycle_first_step_size", options.cycle_first_step_size},
                 {"cycle_first_stair_count", options.cycle_first_stair_count},
                 {"decay_step_size", options.decay_step_size},
                 {"cycle_momentum", options.cycle_momentum},
                 {"cycle_min_mom", per_group_json(options.cycle_min_mom)},
                 {"cycle_max_mom", per_group_json(options.cycle_max_mom)},
                 {"decay_mom_rate", options.decay_mom_rate}};
  if (options.cycle_second_step_size) params["cycle_second_step_size"] = *options.cycle_second_step_size;
  if (options.cycle_second_stair_count) params["cycle_second_stair_count"] = *options.cycle_second_stair_count;
  return params;
}

Json warmup_json(const ScheduleOptions& options) {
  Json params = {{"warmup_num_steps", options.warmup_num_steps},
                 {"warmup_type", options.warmup_type == WarmupKind::kLog ? "log" : "linear"}};
  if (options.kind != ScheduleKind::kWarmup) params["total_num_steps"] = options.total_num_steps;
  if (options.kind == ScheduleKind::kWarmupCosine) {
    params["warmup_min_ratio"] = options.warmup_min_ratio;
    params["cos_min_ratio"] = options.cos_min_ratio;
  } else {
    const bool from_optimizer = options.warmup_max_lr == ScheduleOptions::kOptimizerLr;
    params["warmup_min_lr"] = per_group_json(options.warmup_min_lr);
    params["warmup_max_lr"] = from_optimizer ? Json("auto") : per_group_json(options.warmup_max_lr);
  }
  return params;
}

Json schedule_params(const ScheduleOptions& options) {
  switch (options.kind) {
    case ScheduleKind::kConstant:
      break;
    case ScheduleKind::kWsd:
      return {{"warmup_num_steps", options.warmup_num_steps},
              {"decay_num_steps", options.decay_num_steps},
              {"total_num_steps", options.total_num_steps},
              {"min_ratio", options.min_ratio}};
    case ScheduleKind::kLinear:
    case ScheduleKind::kCosine:
      return {{"warmup_num_steps", options.warmup_num_steps},
              {"total_num_steps", options.total_num_steps},
              {"min_ratio", options.min_ratio}};
    case ScheduleKind::kLrRangeTest:
      return {{"lr_range_test_min_lr", per_group_json(options.lr_range_test.min_lr)},
              {"lr_range_test_step_size", options.lr_range_test.step_size},
              {"lr_range_test_step_rate", options.lr_range_test.step_rate},
              {"lr_range_test_staircase", options.lr_range_test.staircase}};
    case ScheduleKind::kOneCycle:
      return cycle_json(options.one_cycle);
    case ScheduleKind::kWarmup:
    case ScheduleKind::kWarmupDecay:
    case ScheduleKind::kWarmupCosine:
      return warmup_json(options);
  }
  return Json::object();
}

void write_precision(const PrecisionOptions& options, Json& json) {
  const LossScaleOptions& scale = options.loss_scale;
  json["bf16"] = {{"enabled", options.weight_dtype == at::kBFloat16},
                  {"check_grad_overflow", options.check_grad_overflow}};
  json["fp16"] = {{"enabled", options.weight_dtype == at::kHalf},
                  {"auto_cast", options.casts_inputs},
                  {"loss_scale", scale.loss_scale},
                  {"initial_scale_power", scale.initial_scale_power},
                  {"loss_scale_window", scale.loss_scale_window},
                  {"hysteresis", scale.hysteresis},
                  {"consecutive_hysteresis", scale.consecutive_hysteresis},
                  {"min_loss_scale", scale.min_loss_scale}};
  json["torch_autocast"] = {{"enabled", options.autocast.enabled},
                            {"dtype", short_name(options.autocast.dtype)},
                            {"lower_precision_safe_modules", options.autocast.lower_precision_safe_modules}};
  json["data_types"] = {{"grad_accum_dtype", short_name(options.accumulation_dtype)}};
  if (options.buffer_dtype) json["data_types"]["buffer_dtype"] = short_name(*options.buffer_dtype);
  if (options.communication_dtype) json["communication_data_type"] = short_name(*options.communication_dtype);
}

const char* gather_name(GatherPolicy gather) {
  return gather == GatherPolicy::kShared ? "shared" : gather == GatherPolicy::kCopy ? "copy" : "auto";
}

const char* place_name(bool offloads) { return offloads ? "cpu" : "none"; }

Json offload_json(const PagerPolicy& pager) {
  const bool offloads = pager.offload_ratio > 0;
  return {{"device", place_name(offloads)}, {"ratio", offloads ? pager.offload_ratio : 1}};
}

Json recompute_json(const RecomputeConfig& config) {
  if (config.mode != RecomputeMode::kSelective) return config.mode == RecomputeMode::kFull ? "full" : "none";
  return {{"mode", "selective"}, {"keep", config.selective.keep}, {"extra_compute", config.selective.extra_compute}};
}

const char* tag_validation_name(TagValidation validation) {
  return validation == TagValidation::kIgnore ? "Ignore" : validation == TagValidation::kFail ? "Fail" : "Warn";
}

}  // namespace

Json to_json(const Config& config) {
  Json json = {{"train_batch_size", config.batch.train_batch_size},
               {"train_micro_batch_size_per_gpu", config.batch.train_micro_batch_size_per_gpu},
               {"gradient_accumulation_steps", config.batch.gradient_accumulation_steps}};
  if (config.optimizer)
    json["optimizer"] = {{"type", optimizer_name(config.optimizer->kind)},
                         {"params", optimizer_params(*config.optimizer)}};
  if (config.scheduler)
    json["scheduler"] = {{"type", name_of(config.scheduler->kind)}, {"params", schedule_params(*config.scheduler)}};
  json["gradient_clipping"] = config.gradient_clipping;
  json["managed_gradient_accumulation"] = config.managed_gradient_accumulation;
  write_precision(config.precision, json);
  json["gradient_allreduce_op"] = config.pager.gradient_op == ReduceOp::kSum ? "sum" : "mean";
  json["gradient_predivide_factor"] = config.pager.predivide_factor;
  json["zero_optimization"] = {{"stage", config.pager.stage},
                               {"offload_optimizer", offload_json(config.pager)},
                               {"offload_param", {{"device", place_name(config.pager.offload_parameters)}}},
                               {"ignore_unused_parameters", config.ignore_unused_parameters},
                               {"leaf_module",
                                {{"classes", config.leaf_modules.classes},
                                 {"names", config.leaf_modules.names},
                                 {"name_suffixes", config.leaf_modules.name_suffixes}}}};
  json["trireme"] = {{"gather", gather_name(config.pager.gather)},
                     {"live_bytes", config.pager.live_bytes},
                     {"prefetch_bytes", config.pager.prefetch_bytes},
                     {"merge_below_bytes", config.pager.units.merge_below_bytes},
                     {"unit_patterns", config.pager.units.patterns},
                     {"poison", config.pager.poison},
                     {"register_buffers", config.pager.register_buffers},
                     {"recompute", recompute_json(config.recompute)},
                     {"tiled", {{"loss_tokens", config.tiled.loss_tokens}, {"mlp_tokens", config.tiled.mlp_tokens}}}};
  json["checkpoint"] = {{"tag_validation", tag_validation_name(config.checkpoint.tag_validation)},
                        {"keep_last", config.checkpoint.keep_last},
                        {"async_save", config.checkpoint.async_save},
                        {"verify", config.checkpoint.verify == Verify::kFirst ? "full" : "while_reading"}};
  json["deterministic"] = config.pager.deterministic;
  json["steps_per_print"] = config.steps_per_print;
  return json;
}

std::string to_text(const Config& config) { return to_json(config).dump(2) + "\n"; }

}  // namespace trireme
