#include "comm/backends/device/device_identity.h"

#include <ATen/ops/zeros.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "comm/host_record.h"
#include "trireme/base/format.h"

namespace trireme::comm {
namespace {

constexpr size_t kIdentityBytes = 256;

/// A GPU's number depends on CUDA_VISIBLE_DEVICES, which ranks may have each its own; its UUID does not.
std::string uuid_of(c10::Device device) {
  void* driver = device.is_cuda() ? ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (driver == nullptr) return device.str();
  // CUresult cuDeviceGetUuid_v2(CUuuid*, CUdevice), which tells the parts of a split GPU apart.
  const auto get_uuid = reinterpret_cast<int (*)(unsigned char*, int)>(::dlsym(driver, "cuDeviceGetUuid_v2"));
  unsigned char uuid[16] = {};
  if (get_uuid == nullptr || get_uuid(uuid, device.index()) != 0) return device.str();
  std::string text = "GPU-";
  for (const unsigned char byte : uuid) text += formatted("{:02x}", byte);
  return text;
}

}  // namespace

std::string identity_of(c10::Device device) {
  // Two containers of one host give it two names; they have one boot.
  return HostRecord::of_this_process().boot_id + " " + uuid_of(device);
}

std::vector<std::string> identities_of_all(Group& host, c10::Device device) {
  const auto size = static_cast<int64_t>(host.size());
  const at::Tensor own = at::zeros({static_cast<int64_t>(kIdentityBytes)}, at::kByte);
  const at::Tensor all = at::zeros({static_cast<int64_t>(kIdentityBytes) * size}, at::kByte);
  const std::string text = identity_of(device).substr(0, kIdentityBytes - 1);
  std::memcpy(own.data_ptr(), text.data(), text.size());
  host.all_gather(all, own).wait();
  std::vector<std::string> identities;
  for (int64_t rank = 0; rank < size; ++rank)
    identities.emplace_back(static_cast<const char*>(all.const_data_ptr()) +
                            static_cast<size_t>(rank) * kIdentityBytes);
  return identities;
}

std::optional<std::pair<int, int>> ranks_on_one_device(const std::vector<std::string>& identities) {
  for (auto later = identities.begin(); later != identities.end(); ++later) {
    const auto first = std::find(identities.begin(), later, *later);
    if (first != later)
      return std::pair(static_cast<int>(first - identities.begin()), static_cast<int>(later - identities.begin()));
  }
  return std::nullopt;
}

}  // namespace trireme::comm
