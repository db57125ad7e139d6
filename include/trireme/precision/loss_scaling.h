// The engine's loss scale, and the proof that a backward pass began at a loss that was multiplied by it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "trireme/precision/loss_scaler.h"

namespace trireme {

class LossScaling {
 public:
  LossScaling(const LossScaleOptions& options, LossScaleRule rule);

  LossScaler& scaler() { return scaler_; }
  const LossScaler& scaler() const { return scaler_; }

  /// `output` in fp32 times the scale, or times `factor` where a device has it ([] fp32). A backward pass through the
  /// result counts as scaled until it ends.
  at::Tensor scale(const at::Tensor& output, const at::Tensor& factor = {}) const;
  /// To be called for each gradient that backward produces. Throws StateError: its pass began elsewhere.
  void check_gradient() const;

 private:
  LossScaler scaler_;
  std::shared_ptr<bool> is_scaled_pass_;  // hooks of the user's graph hold it, and may outlive the engine
};

}  // namespace trireme
