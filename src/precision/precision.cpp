#include "trireme/precision/precision.h"

#include "trireme/base/error.h"

namespace trireme {

void check_precision(const PrecisionOptions& options) {
  const at::ScalarType weights = options.weight_dtype;
  if (weights == at::kHalf)
    throw ConfigError(
        "fp16: training in fp16 needs loss scaling, which is not there yet; use bf16.enabled=true or fp32",
        ErrorCode::kUnsupported);
  if (weights != at::kFloat && weights != at::kBFloat16)
    throw ConfigError(str("precision: weights in ", short_name(weights), " cannot be trained; use fp32 or bf16"));
  if (options.accumulation_dtype != at::kFloat && options.accumulation_dtype != weights)
    throw ConfigError(str("data_types.grad_accum_dtype: gradients cannot be summed in ",
                          short_name(options.accumulation_dtype), " when the weights are ", short_name(weights),
                          "; use fp32", weights == at::kFloat ? "" : " or bf16"));
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
