#include "trireme/device/device.h"

#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>
#include <unistd.h>

#include <charconv>
#include <mutex>
#include <optional>

#include "device/driver.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/device/stream.h"

namespace trireme {

namespace {

// The N of "cuda:N".
std::optional<int> number_of(std::string_view name) {
  constexpr std::string_view kPrefix = "cuda:";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  int number = 0;
  const char* end = name.data() + name.size();
  const auto read = std::from_chars(name.data() + kPrefix.size(), end, number);
  const bool is_number = read.ec == std::errc() && read.ptr == end && number >= 0;
  return is_number ? std::optional(number) : std::nullopt;
}

c10::Device gpu(int number) {
  load_cuda();
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(number));
  // Else each rank of a host would have a context on its first GPU too, and programs that say "cuda" would be there.
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
  return device;
}

/// A GPU of the driver, as far as libtorch can use it.
c10::Device gpu_or_host(int number) {
  try {
    return gpu(number);
  } catch (const Error& error) {
    static std::once_flag told;
    std::call_once(told, [&] { log(LogLevel::kWarning, str("device \"auto\" is the host: ", error.what())); });
    return c10::Device(c10::kCPU);
  }
}

std::optional<c10::CachingDeviceAllocator::DeviceStats> stats_of(c10::Device device) {
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator == nullptr || !allocator->initialized()) return std::nullopt;
  return allocator->getDeviceStats(device.index());
}

}  // namespace

int count_gpus() { return ask_driver().gpus; }

GpuList list_gpus() {
  const DriverAnswer& driver = ask_driver();
  GpuList list{.gpus = {}, .problem = driver.problem};
  for (int number = 0; number < driver.gpus; ++number) list.gpus.push_back(ask_gpu(number));
  return list;
}

void check_device(std::string_view name) {
  if (name == "cpu" || name == "auto") return;
  const std::optional<int> number = number_of(name);
  if (name != "cuda" && !number)
    throw ConfigError(str("device \"", name, "\" is none of auto, cpu, cuda and cuda:N (the N-th GPU, from 0)"));
  const DriverAnswer& driver = ask_driver();
  if (driver.gpus == 0)
    throw ConfigError(str("device \"", name, "\": ", driver.problem,
                          "; use \"cpu\", or \"auto\" to take a GPU where "
                          "there is one"));
  if (number && *number >= driver.gpus)
    throw ConfigError(str("device \"", name, "\": there are ", driver.gpus,
                          " GPUs, counted from 0; use \"cuda:", driver.gpus - 1, "\" or one below"));
}

c10::Device choose_device(std::string_view name, int local_rank) {
  check_device(name);
  const int gpus = name == "cpu" ? 0 : count_gpus();
  if (gpus == 0) return c10::Device(c10::kCPU);
  return name == "auto" ? gpu_or_host(local_rank % gpus) : gpu(number_of(name).value_or(local_rank % gpus));
}

std::string device_name(c10::Device device) {
  if (is_host(device)) return "cpu";
  if (device.is_cuda()) {
    if (void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) {
      const auto get_name = reinterpret_cast<int (*)(char*, int, int)>(dlsym(driver, "cuDeviceGetName"));
      char name[128] = {};
      if (get_name != nullptr && get_name(name, sizeof(name) - 1, device.index()) == 0) return name;
    }
  }
  return device.str();
}

at::Tensor pinned_memory(int64_t numel, at::ScalarType dtype, c10::Device device) {
  return at::empty({numel}, at::TensorOptions().dtype(dtype).pinned_memory(!is_host(device)));
}

DeviceMemory device_memory(c10::Device device) {
  if (is_host(device)) return {};
  const auto stats = stats_of(device);
  if (!stats) return {};
  const auto& bytes = stats->allocated_bytes[0];  // over all pools
  return {bytes.current, bytes.peak};
}

int64_t total_memory(c10::Device device) {
  if (is_host(device)) return static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  return allocator == nullptr ? 0 : static_cast<int64_t>(allocator->getMemoryInfo(device.index()).second);
}

void give_back_idle_memory(c10::Device device) {
  if (is_host(device)) return;
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator != nullptr && allocator->initialized()) allocator->emptyCache();
}

void reset_device_peak(c10::Device device) {
  if (is_host(device)) return;
  auto* allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(device.type()));
  if (allocator != nullptr && allocator->initialized()) allocator->resetPeakStats(device.index());
}

}  // namespace trireme
