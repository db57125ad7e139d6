#include "comm/backends/nccl/nccl_group.h"

#include <utility>

#include "comm/backends/device/device_group.h"
#include "comm/backends/nccl/nccl_transport.h"
#include "trireme/base/error.h"

namespace trireme {

#ifdef TRIREME_HAS_NCCL
std::unique_ptr<Group> comm::make_nccl_group(const NcclApi& api, std::unique_ptr<Group> host, c10::Device device,
                                             const NcclGroupOptions& options) {
  return std::make_unique<DeviceGroup>(std::move(host), device, [&api, options](const TransportSite& site) {
    return std::make_shared<NcclTransport>(api, options, site);
  });
}

std::unique_ptr<Group> make_nccl_group(std::unique_ptr<Group> host, c10::Device device,
                                       const NcclGroupOptions& options) {
  if (!device.is_cuda()) throw ConfigError(str("NCCL serves NVIDIA GPUs, such as cuda:0, and not ", device.str()));
  return comm::make_nccl_group(comm::load_nccl(), std::move(host), device, options);
}
#else
std::unique_ptr<Group> make_nccl_group(std::unique_ptr<Group>, c10::Device, const NcclGroupOptions&) {
  throw ConfigError(
      "NCCL: Trireme was built without NCCL's headers, which lie beside the CUDA build of torch "
      "(nvidia/nccl and nvidia/cu13 in site-packages); build it with that torch, or take the device "
      "\"cpu\"",
      ErrorCode::kUnsupported);
}
#endif

}  // namespace trireme
