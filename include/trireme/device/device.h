// Which devices there are, and memory of the host that they reach without waiting.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

/// NVIDIA GPUs that this process may use. Asks the driver alone: libtorch's CUDA half is not loaded.
int count_gpus();

/// A GPU, as the driver tells of it.
struct GpuFacts {
  std::string name;   ///< "NVIDIA H200"
  int64_t bytes = 0;  ///< of its memory
};

/// The GPUs of count_gpus(), in the order of "cuda:N", or why there are none. Asks the driver alone.
struct GpuList {
  std::vector<GpuFacts> gpus;
  std::string problem;  ///< empty where there are some
};
GpuList list_gpus();

/// The device of a process that is number `local_rank` on its host. `name` is "auto" (a GPU where there is one, else
/// the host), "cpu", "cuda" (the GPU of that rank) or "cuda:N". If there are more ranks than GPUs, rank r takes GPU r
/// mod their number. Loads libtorch's CUDA half into the process where a GPU is chosen: a C++ program need not link it,
/// and calls this before anything else asks libtorch for an accelerator, such as a backward pass. A GPU becomes this
/// thread's current device.
///
/// Throws    ConfigError: another name; a GPU that is not there, with what was found. Error: libtorch cannot use the
///           GPU ("auto" then warns, once, and takes the host).
c10::Device choose_device(std::string_view name, int local_rank);

/// The checks of choose_device() that need only the driver. Throws as that; loads nothing.
void check_device(std::string_view name);

/// "NVIDIA H200", or "cpu".
std::string device_name(c10::Device device);

/// [numel] of page-locked host memory, from and to which `device` copies while the host goes on; ordinary memory where
/// `device` is the host.
at::Tensor pinned_memory(int64_t numel, at::ScalarType dtype, c10::Device device);

/// Bytes of `device` that libtorch's allocator gave out, now and at most since reset_device_peak(). 0 on the host.
struct DeviceMemory {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;
};
DeviceMemory device_memory(c10::Device device);
/// Bytes of memory that `device`, or this host, has in all, whoever uses it; 0: unknown.
int64_t total_memory(c10::Device device);
/// Returns the unused memory that libtorch's allocator caches to the device, for other allocators and processes.
void give_back_idle_memory(c10::Device device);
void reset_device_peak(c10::Device device);

}  // namespace trireme
