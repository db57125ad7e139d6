#include "comm/backends/cuda_ipc/ipc_group.h"

#include <utility>

#include "comm/backends/cuda_ipc/ipc_transport.h"
#include "comm/backends/device/device_backend.h"
#include "trireme/base/error.h"

namespace trireme {

std::unique_ptr<Group> comm::make_cuda_ipc_group(const CudaApi& api, std::unique_ptr<Group> host, c10::Device device,
                                                 const CudaIpcOptions& options) {
  auto backend = std::make_unique<DeviceBackend>(std::move(host), device, [&api, options](const TransportSite& site) {
    return std::make_shared<IpcTransport>(api, options, site);
  });
  return std::make_unique<Group>(std::move(backend));
}

std::unique_ptr<Group> make_cuda_ipc_group(std::unique_ptr<Group> host, c10::Device device,
                                           const CudaIpcOptions& options) {
  if (!device.is_cuda()) throw ConfigError(str("cuda_ipc serves NVIDIA GPUs, such as cuda:0, and not ", device.str()));
  return comm::make_cuda_ipc_group(comm::load_cuda_driver(), std::move(host), device, options);
}

}  // namespace trireme
