// Kernels in CUDA C++ that are compiled where they run, by the NVRTC that libtorch's CUDA brings: the library is built
// without CUDA's compiler, and every GPU gets code of its own.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace trireme {

/// The source that NVRTC compiles. Functions are __device__ unless they say otherwise; products and sums are not fused,
/// so they round as on the host. Only the headers given here can be included.
struct KernelText {
  std::string function;  ///< extern "C" __global__ void function(const Argument argument)
  std::string text;
  std::vector<std::pair<std::string, std::string>> headers;  ///< by the name in #include
};

/// Machine code for GPUs of `architecture`, such as "sm_90". Needs no GPU.
/// Throws    Error(kUnsupported): no NVRTC, one that does not know the architecture, or a text that it refuses, with
///           its words.
std::string compile_kernel(const KernelText& kernel, const std::string& architecture);

/// One kernel on all GPUs of this process. Any thread may call it.
class DeviceKernel {
 public:
  explicit DeviceKernel(KernelText text);
  ~DeviceKernel();

  /// Compiles and loads the kernel, a fraction of a second at the first call for `device`. Returns why it cannot be
  /// launched there; empty: it can.
  const std::string& prepare(c10::Device device);
  /// Enqueues it on this thread's current stream of `device`. `argument` is copied.
  /// Throws    Error(kUnsupported) with what prepare() returned; Error(kInternal): the driver's, of this or of earlier
  ///           work.
  void launch(c10::Device device, int blocks, int threads, const void* argument);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
