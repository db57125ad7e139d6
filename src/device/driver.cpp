#include "device/driver.h"

#include <ATen/Context.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>

#include "trireme/base/error.h"

namespace trireme {

namespace {

DriverAnswer ask() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (driver == nullptr) return {0, "no NVIDIA driver was found (libcuda.so.1)"};
  // Types of cuda.h that never changed: CUresult is an int, and 0 is success.
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(driver, "cuDeviceGetCount"));
  if (init == nullptr || count == nullptr) return {0, "libcuda.so.1 is no NVIDIA driver"};
  if (const int code = init(0); code != 0) return {0, str("the NVIDIA driver finds no GPU (cuInit gives ", code, ")")};
  int gpus = 0;
  if (const int code = count(&gpus); code != 0) return {0, str("the NVIDIA driver counts no GPUs (error ", code, ")")};
  if (gpus == 0) return {0, "the NVIDIA driver shows no GPU (is CUDA_VISIBLE_DEVICES empty?)"};
  return {gpus, ""};
}

bool is_registered() { return c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA); }

}  // namespace

const DriverAnswer& ask_driver() {
  static const DriverAnswer answer = ask();
  return answer;
}

GpuFacts ask_gpu(int number) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  // A number below that of cuDeviceGetCount() is its CUdevice, an int.
  const auto get_name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
  const auto get_memory = reinterpret_cast<int (*)(size_t*, int)>(dlsym(driver, "cuDeviceTotalMem_v2"));
  char name[128] = {};
  size_t bytes = 0;
  if (get_name == nullptr || get_name(name, sizeof(name) - 1, number) != 0) name[0] = '?';
  if (get_memory == nullptr || get_memory(&bytes, number) != 0) bytes = 0;
  return {.name = name, .bytes = static_cast<int64_t>(bytes)};
}

void load_cuda() {
  if (is_registered()) {  // a Python program, or one that links libtorch_cuda.so
    if (at::globalContext().hasCUDA()) return;
    throw Error(ErrorCode::kUnsupported,
                "libtorch's CUDA finds no GPU, though the driver does: it is older than libtorch's CUDA; update the "
                "driver, or use the device \"cpu\"");
  }
  // Beside libtorch_cpu.so, where this library's own run path leads. Global: its parts find each other's symbols.
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr)
    throw Error(ErrorCode::kUnsupported, str("libtorch has no CUDA half here (", dlerror(),
                                             "); install the CUDA build of torch, or use the device \"cpu\""));
  // libtorch looks for its CUDA half once, at the first question that concerns it.
  if (!is_registered() || !at::globalContext().hasCUDA())
    throw Error(
        ErrorCode::kUnsupported,
        "libtorch_cuda.so was loaded and brought no CUDA device: libtorch was asked for one before, or the driver "
        "is older than its CUDA; call choose_device() first in the program, or use the device \"cpu\"");
}

}  // namespace trireme
