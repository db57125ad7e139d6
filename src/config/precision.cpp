#include "trireme/precision/precision.h"

#include <limits>

#include "config/read_parts.h"

namespace trireme {
namespace {

const std::vector<std::string> kDtypes = {"fp32", "bf16", "fp16"};

at::ScalarType dtype_of(const std::string& name) {
  return name == "fp16" ? at::kHalf : name == "bf16" ? at::kBFloat16 : at::kFloat;
}

void read_bf16(Section& top, PrecisionOptions& precision) {
  top.rename("bfloat16", "bf16", Spelling::kAlias);
  Section bf16 = top.section("bf16");
  if (bf16.flag_or("enabled", false)) precision.weight_dtype = at::kBFloat16;
  precision.check_grad_overflow = bf16.flag_or("check_grad_overflow", precision.check_grad_overflow);
  if (bf16.has("immediate_grad_update")) {
    bf16.flag_or("immediate_grad_update", false);
    bf16.without_meaning("immediate_grad_update");
  }
  for (const char* key : {"bf16_master_weights_and_grads", "bf16_optimizer_states"})
    if (bf16.flag_or(key, false))
      bf16.not_there_yet(key, "masters and optimizer states are fp32; remove it or set it to false");
  bf16.finish();
}

void read_torch_autocast(Section& top, AutocastOptions& autocast) {
  Section section = top.section("torch_autocast");
  autocast.enabled = section.flag_or("enabled", autocast.enabled);
  const std::string dtype = section.choice_or(
      "dtype", "bfloat16", {"bfloat16", "float16", "bf16", "fp16", "torch.bfloat16", "torch.float16"});
  autocast.dtype = dtype.find('b') == std::string::npos ? at::kHalf : at::kBFloat16;
  autocast.lower_precision_safe_modules =
      section.texts_or("lower_precision_safe_modules", autocast.lower_precision_safe_modules);
  section.finish();
}

/// What is out of range is refused only where the scale is dynamic: elsewhere nobody looks at it.
void read_loss_scale(Section& fp16, bool is_used, LossScaleOptions& options) {
  options.loss_scale =
      fp16.number_or("loss_scale", options.loss_scale,
                     {.min = 0, .max = kNonNegative.max, .words = "a finite number >= 0 (0: dynamic)"});
  const bool is_dynamic = is_used && options.loss_scale == 0;
  const auto integer = [&](const char* key, int64_t& value, const IntegerRange& range) {
    value = fp16.integer_or(key, value, is_dynamic ? range : IntegerRange{});
  };
  integer("initial_scale_power", options.initial_scale_power,
          {.min = 0, .max = 126, .words = "an integer from 0 to 126"});
  integer("loss_scale_window", options.loss_scale_window, kPositive);
  integer("hysteresis", options.hysteresis, kPositive);
  options.consecutive_hysteresis = fp16.flag_or("consecutive_hysteresis", options.consecutive_hysteresis);
  options.min_loss_scale = fp16.number_or("min_loss_scale", options.min_loss_scale, {});
  const bool is_positive = options.min_loss_scale > 0 && options.min_loss_scale <= kNonNegative.max;
  if (is_dynamic && !is_positive) fp16.fail("min_loss_scale", "a finite number > 0");
}

void read_fp16(Section& top, PrecisionOptions& precision) {
  Section fp16 = top.section("fp16");
  const bool enabled = fp16.flag_or("enabled", false);
  if (enabled) {
    if (precision.weight_dtype == at::kBFloat16)
      fp16.refuse(str("`", fp16.path_of("enabled"),
                      "` = true and `bf16.enabled` = true exclude each other; set one of the two to false"));
    precision.weight_dtype = at::kHalf;
  }
  precision.casts_inputs = fp16.flag_or("auto_cast", false) && enabled;
  read_loss_scale(fp16, precision.needs_loss_scale(), precision.loss_scale);
  if (fp16.flag_or("fp16_master_weights_and_grads", false))
    fp16.not_there_yet("fp16_master_weights_and_grads",
                       "masters and optimizer states are fp32; remove it or set it to false");
  fp16.finish();
}

void read_data_types(Section& top, PrecisionOptions& precision) {
  Section types = top.section("data_types");
  const std::string weights = short_name(precision.weight_dtype);
  const std::string accumulation = types.choice_or("grad_accum_dtype", "fp32", kDtypes);
  if (accumulation != "fp32" && accumulation != weights)
    types.fail("grad_accum_dtype",
               weights == "fp32" ? str("\"fp32\", or ", accumulation, ".enabled = true for \"", accumulation, "\"")
                                 : "\"fp32\" or \"" + weights + "\"");
  precision.accumulation_dtype = dtype_of(accumulation);
  if (types.choice_or("param_dtype", weights, kDtypes) != weights)
    types.fail("param_dtype",
               str("\"", weights, "\", the dtype that ", weights == "fp16" ? "fp16" : "bf16", ".enabled chooses"));
  if (types.has("buffer_dtype")) precision.buffer_dtype = dtype_of(types.choice_or("buffer_dtype", weights, kDtypes));
  types.finish();
}

void read_communication(Section& top, PrecisionOptions& precision) {
  const char* key = "communication_data_type";
  if (!top.has(key)) return;
  const std::string wire = top.choice_or(key, "fp32", kDtypes);
  const std::string sums = short_name(precision.accumulation_dtype);
  if (wire != "fp32" && sums != "fp32" && wire != sums)
    top.fail(key, "\"fp32\" or \"" + sums + "\", in which data_types.grad_accum_dtype has the sums");
  precision.communication_dtype = dtype_of(wire);
}

}  // namespace

PrecisionOptions read_precision(Section& top) {
  PrecisionOptions precision;
  read_bf16(top, precision);
  read_torch_autocast(top, precision.autocast);
  read_fp16(top, precision);
  if (precision.autocast.enabled && precision.weight_dtype != at::kFloat)
    top.refuse(str("`torch_autocast.enabled` = true and `", short_name(precision.weight_dtype),
                   ".enabled` = true exclude each other; set one of the two to false"));
  read_data_types(top, precision);
  read_communication(top, precision);
  return precision;
}

void read_gradient_reduction(Section& top, int data_degree, PagerPolicy& pager) {
  const std::string op = top.choice_or("gradient_allreduce_op", "mean", {"mean", "sum"});
  pager.gradient_op = op == "sum" ? ReduceOp::kSum : ReduceOp::kMean;
  pager.predivide_factor = top.number_or("gradient_predivide_factor", pager.predivide_factor,
                                         {.min = std::numeric_limits<double>::min(),
                                          .max = std::numeric_limits<double>::max(),
                                          .words = "a finite number > 0"});
  if (!top.flag_or("prescale_gradients", false)) return;
  if (pager.predivide_factor != 1)
    top.refuse(
        "`prescale_gradients` = true divides gradients by the number of ranks before they travel, and "
        "`gradient_predivide_factor` by another number; keep one of the two");
  pager.predivide_factor = data_degree;
}

}  // namespace trireme
