#include "trireme/device/nvidia_library.h"

#include <c10/core/Device.h>
#include <dlfcn.h>

#include <filesystem>

#include "trireme/base/error.h"

namespace trireme {

std::filesystem::path torch_libraries() {
  Dl_info torch{};
  const auto* symbol =
      reinterpret_cast<const void*>(static_cast<std::string (*)(c10::DeviceType, bool)>(&c10::DeviceTypeName));
  if (::dladdr(symbol, &torch) == 0 || torch.dli_fname == nullptr) return {};
  return std::filesystem::path(torch.dli_fname).parent_path();
}

void* open_nvidia_library(const std::string& name, const std::string& wheel, std::string& problem) {
  // A process has one of each: that of libtorch, where it is loaded.
  if (void* loaded = ::dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD)) return loaded;
  if (void* found = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return found;
  const std::string path = (torch_libraries() / "../../nvidia" / wheel / "lib" / name).lexically_normal().string();
  if (void* found = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return found;
  problem = str(::dlerror(), "; neither the loader nor ", path, " has it");
  return nullptr;
}

}  // namespace trireme
