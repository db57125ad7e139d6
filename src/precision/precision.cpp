#include "trireme/precision/precision.h"

#include "trireme/base/error.h"

namespace trireme {

namespace {

bool is_16_bit(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

void check_communication(const PrecisionOptions& options) {
  if (!options.communication_dtype) return;
  const at::ScalarType wire = *options.communication_dtype;
  if (wire != at::kFloat && !is_16_bit(wire))
    throw ConfigError(
        str("communication_data_type: gradients cannot travel in ", short_name(wire), "; use fp32, bf16 or fp16"));
  if (wire != at::kFloat && options.accumulation_dtype != at::kFloat && wire != options.accumulation_dtype)
    throw ConfigError(str("communication_data_type: gradients that are summed in ",
                          short_name(options.accumulation_dtype), " cannot travel in ", short_name(wire),
                          "; use fp32 or ", short_name(options.accumulation_dtype)));
}

void check_update(const PrecisionOptions& options) {
  if (options.stochastic_rounding && options.update_dtype != at::kBFloat16)
    throw ConfigError(str("trireme.stochastic_rounding: it is for updates in bf16, and these are in ",
                          short_name(options.update_dtype),
                          "; set bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states to true, or remove "
                          "it"));
  if (options.update_dtype == at::kFloat) return;
  const auto refuse = [&](const auto&... why) {
    throw ConfigError(
        str("precision: masters, states and steps cannot be in ", short_name(options.update_dtype), why...));
  };
  if (options.update_dtype != at::kBFloat16) refuse("; use fp32, or bf16 with weights and sums in bf16");
  if (options.weight_dtype != options.update_dtype)
    refuse(" when the weights are ", short_name(options.weight_dtype), "; set bf16.enabled to true");
  if (options.accumulation_dtype != options.update_dtype)
    refuse(" when gradients are summed in ", short_name(options.accumulation_dtype),
           "; set data_types.grad_accum_dtype to bf16");
}

void check_autocast(const PrecisionOptions& options) {
  if (!options.autocast.enabled) return;
  if (!is_16_bit(options.autocast.dtype))
    throw ConfigError(str("torch_autocast.dtype: operators cannot be cast to ", short_name(options.autocast.dtype),
                          "; use bf16 or fp16"));
  if (options.weight_dtype != at::kFloat)
    throw ConfigError(str("torch_autocast.enabled: autocast is for fp32 weights, and these are ",
                          short_name(options.weight_dtype), "; switch one of the two off"));
}

}  // namespace

void check_precision(const PrecisionOptions& options) {
  const at::ScalarType weights = options.weight_dtype;
  if (weights != at::kFloat && !is_16_bit(weights))
    throw ConfigError(str("precision: weights in ", short_name(weights), " cannot be trained; use fp32, bf16 or fp16"));
  if (options.accumulation_dtype != at::kFloat && options.accumulation_dtype != weights)
    throw ConfigError(str("data_types.grad_accum_dtype: gradients cannot be summed in ",
                          short_name(options.accumulation_dtype), " when the weights are ", short_name(weights),
                          "; use fp32", weights == at::kFloat ? "" : " or " + short_name(weights)));
  if (options.buffer_dtype && *options.buffer_dtype != at::kFloat && !is_16_bit(*options.buffer_dtype))
    throw ConfigError(str("data_types.buffer_dtype: buffers cannot be ", short_name(*options.buffer_dtype),
                          "; use fp32, bf16 or fp16"));
  check_update(options);
  check_communication(options);
  check_autocast(options);
  if (options.needs_loss_scale()) check_loss_scale(options.loss_scale);
}

std::string short_name(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return "fp32";
    case at::kDouble:
      return "fp64";
    case at::kBFloat16:
      return "bf16";
    case at::kHalf:
      return "fp16";
    default:
      return c10::toString(dtype);
  }
}

}  // namespace trireme
