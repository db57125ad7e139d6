// The few questions that the NVIDIA driver answers before libtorch's CUDA half is loaded.
#pragma once

#include <string>

#include "trireme/device/device.h"

namespace trireme {

struct DriverAnswer {
  int gpus = 0;
  std::string problem;  ///< why there are none; empty where there are
};

/// Asked once per process: the driver reads CUDA_VISIBLE_DEVICES at its first call alone.
const DriverAnswer& ask_driver();

/// Requires  a number below `gpus` of ask_driver().
GpuFacts ask_gpu(int number);

/// Loads libtorch_cuda.so, which registers its kernels. Throws Error(kUnsupported): it is not there, or too old a
/// driver.
void load_cuda();

}  // namespace trireme
