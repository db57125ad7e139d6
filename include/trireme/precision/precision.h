// In which dtypes weights, gradients and the update live.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string>
#include <vector>

#include "trireme/precision/loss_scaler.h"

namespace trireme {

/// The module's forward runs under autocast of the parameters' device: weights stay fp32, operators that are safe in 16
/// bits compute in it.
struct AutocastOptions {
  bool enabled = false;
  at::ScalarType dtype = at::kBFloat16;  ///< or fp16, with loss scaling
  /// Classes of modules (not of derived ones) whose parameters' gradients are sent between ranks in `dtype`. Only the
  /// last part of a name counts: "torch.nn.Linear" is torch::nn::Linear.
  std::vector<std::string> lower_precision_safe_modules = {"torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d",
                                                           "torch.nn.Conv3d"};
  bool operator==(const AutocastOptions&) const = default;
};

/// With 16-bit weights the mode `mixed` of docs/precision.md, or `low` if `update_dtype` has 16 bits too.
struct PrecisionOptions {
  /// fp32, bf16 or fp16: parameters are cast to it once, at initialize().
  at::ScalarType weight_dtype = at::kFloat;
  /// Gradients are summed over ranks and micro-batches in this dtype: fp32, or weight_dtype.
  at::ScalarType accumulation_dtype = at::kFloat;
  /// The dtype of masters, optimizer states and the arithmetic of steps: fp32, or bf16 with bf16 weights. With bf16 the
  /// weights are their own masters, and gradients are summed in bf16 too.
  at::ScalarType update_dtype = at::kFloat;
  /// With bf16 updates: compute them in fp32 and round weights and states stochastically, so that steps too small for
  /// bf16 are taken on average. Otherwise each operator rounds to nearest, as in torch.optim.
  bool stochastic_rounding = false;
  /// A 16-bit dtype in which gradients are sent between ranks. Nothing, or fp32: the dtype that they are kept in.
  std::optional<at::ScalarType> communication_dtype = {};
  /// Floating-point buffers are cast to it, once. Nothing: they keep the model's dtype.
  std::optional<at::ScalarType> buffer_dtype = {};
  /// A step whose gradients are not finite is skipped on all ranks. Off: in bf16 it is applied, and the weights become
  /// NaN; in fp32 and fp16 it is skipped all the same.
  bool check_grad_overflow = true;
  /// Floating inputs of forward() are cast to weight_dtype.
  bool casts_inputs = false;
  /// Used only if needs_loss_scale().
  LossScaleOptions loss_scale = {};
  AutocastOptions autocast = {};
  bool operator==(const PrecisionOptions&) const = default;

  bool needs_loss_scale() const {
    return weight_dtype == at::kHalf || (autocast.enabled && autocast.dtype == at::kHalf);
  }
};

/// Whether a step whose gradients are not finite changes nothing.
inline bool skips_overflows(const PrecisionOptions& options) {
  return options.weight_dtype != at::kBFloat16 || options.check_grad_overflow;
}

/// Throws    ConfigError: weights that are neither fp32 nor bf16 nor fp16, an accumulation dtype that is neither fp32
///           nor the weights', an update dtype that is neither fp32 nor bf16 with weights and sums in it, a
///           communication dtype that the sums cannot be converted from, autocast over 16-bit weights; as
///           check_loss_scale() where something computes in fp16.
void check_precision(const PrecisionOptions& options);

/// "fp32", "bf16", "fp16"; otherwise ATen's name.
std::string short_name(at::ScalarType dtype);

}  // namespace trireme
