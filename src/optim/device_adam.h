// Adam and AdamW of 16-bit weights on a device: one pass over flat memory, few launches, no number that the host waits
// for.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/device/kernel.h"
#include "trireme/optim/options.h"

namespace trireme {

/// The memory of many ranges: entry i of each list belongs to range i.
struct AdamLists {
  std::vector<at::Tensor> masters;    ///< [n] fp32
  std::vector<at::Tensor> weights;    ///< [n] bf16 or fp16
  std::vector<at::Tensor> gradients;  ///< [n] fp32, bf16 or fp16
  std::vector<at::Tensor> first;      ///< [n] fp32
  std::vector<at::Tensor> second;     ///< [n] fp32
  std::vector<at::Tensor> steps;      ///< [] fp32: the number of the update
};

/// Whether adam_on_device() works on `device`. Its first call for a GPU compiles the kernel; where that fails, a
/// warning says why, once, and ATen's kernels are there.
bool has_adam_kernel(c10::Device device);

inline std::optional<at::Tensor> if_defined(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

/// The source that NVRTC compiles for it.
const KernelText& adam_kernel_text();

/// Collective: whether `own` is true on every rank.
bool is_true_on_all(Group& group, bool own);

/// adam_in_one_pass() for all ranges, 56 per launch, by numbers of the device.
///
/// Arguments `lr`, `gradient_factor`, `skip`: as in StepDecision, the latter two undefined or [] fp32.
/// Cost      one pass: reads 14 or 16, writes 14 bytes per element. On a GPU NVRTC's code of adam_kernel.h; the
///           operator trireme::adam_ also has a kernel for the host, which runs the same text.
/// Source    as adam_in_one_pass(). Tests: device_adam_test.cpp, tests/gpu/optim_test.cpp.
void adam_on_device(const AdamLists& lists, const OptimizerOptions& optimizer, const at::Tensor& lr,
                    const at::Tensor& gradient_factor, const at::Tensor& skip);

}  // namespace trireme
