// In which dtypes weights, gradients and the update live.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace trireme {

/// Masters and optimizer states are fp32 in every mode.
struct PrecisionOptions {
  /// fp32, or bf16: parameters and floating buffers are cast once, at initialize.
  at::ScalarType weight_dtype = at::kFloat;
  /// Gradients are summed over ranks and micro-batches in this dtype: fp32, or weight_dtype.
  at::ScalarType accumulation_dtype = at::kFloat;
  /// A step whose gradients are not finite is skipped on all ranks. Off: in bf16 it is applied, and the weights become
  /// NaN; in fp32 it is skipped all the same.
  bool check_grad_overflow = true;
  bool operator==(const PrecisionOptions&) const = default;
};

/// Throws    ConfigError: a weight dtype other than fp32 and bf16 (fp16 with its loss scaling is not there yet), an
///           accumulation dtype that is neither fp32 nor the weights'.
void check_precision(const PrecisionOptions& options);

/// "fp32", "bf16", "fp16"; otherwise ATen's name.
std::string short_name(at::ScalarType dtype);

}  // namespace trireme
