#include "comm/backends/nccl/nccl_group.h"

#include <utility>

#include "comm/backends/device/device_backend.h"
#include "comm/backends/nccl/nccl_transport.h"
#include "trireme/base/error.h"

namespace trireme {

std::unique_ptr<Group> comm::make_nccl_group(const NcclApi& api, std::unique_ptr<Group> host, c10::Device device,
                                             const NcclGroupOptions& options) {
  auto backend = std::make_unique<DeviceBackend>(std::move(host), device, [&api, options](const TransportSite& site) {
    return std::make_shared<NcclTransport>(api, options, site);
  });
  return std::make_unique<Group>(std::move(backend));
}

std::unique_ptr<Group> make_nccl_group(std::unique_ptr<Group> host, c10::Device device,
                                       const NcclGroupOptions& options) {
  if (!device.is_cuda()) throw ConfigError(str("NCCL serves NVIDIA GPUs, such as cuda:0, and not ", device.str()));
  return comm::make_nccl_group(comm::load_nccl(), std::move(host), device, options);
}

}  // namespace trireme
