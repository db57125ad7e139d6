// An optimizer step on a device: few launches over many ranges of flat memory, and no number that the host waits
// for.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "optim/update.h"
#include "trireme/optim/optimizer.h"

namespace trireme {

/// How often each parameter was updated, as numbers of the device: only it knows which steps were skipped.
class DeviceSteps {
 public:
  DeviceSteps(size_t parameters, c10::Device device);

  /// By parameter. Equal ones have had the same updates, so that they can go into one range.
  const std::vector<int64_t>& histories() const { return histories_; }
  /// [] fp32: the number of the update that is being made, between begin() and end().
  at::Tensor of(int parameter) const { return counts_.select(0, parameter); }
  /// An update of the parameters that are `touched` begins.
  void begin(const std::vector<bool>& touched);
  /// It was none where `skip` is 1.
  void end(const at::Tensor& skip);

  void set(const std::vector<int64_t>& counts);
  /// The host waits for the device.
  std::vector<int64_t> read() const;

 private:
  at::Tensor counts_;   // [parameters] fp32, as ATen's kernels want them
  at::Tensor touched_;  // [parameters] fp32: 1 where an update is being made
  std::vector<bool> touched_on_host_;
  std::vector<int64_t> histories_;
  int64_t updates_ = 0;
};

/// A range of one parameter group, and the number of its update, [] fp32.
struct DeviceRun {
  UpdateSpan span;
  at::Tensor step;
};

bool is_adam(OptimizerKind kind);

/// Whether update_on_device() knows `kind`.
bool is_on_devices(OptimizerKind kind);

/// update() for all `runs` of one group, with `decision` in place of numbers. Gradients may be overwritten.
///
/// Arguments `by_adam_kernel`: where has_adam_kernel(), and on every rank or on none, since it rounds otherwise than
/// ATen.
/// Cost      16-bit weights under Adam and AdamW by that kernel: one pass (device_adam.h). Else ATen's multi-tensor
///           kernels: one pass as update()'s, and one that rounds where weights have 16 bits.
/// Source    as update()'s; Lion with ATen's element-wise operators.
void update_on_device(const std::vector<DeviceRun>& runs, const OptimizerOptions& optimizer,
                      const StepDecision& decision, const at::Tensor& lr, bool by_adam_kernel);

}  // namespace trireme
