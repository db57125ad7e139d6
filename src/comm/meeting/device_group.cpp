#include "trireme/comm/device_group.h"

#include "comm/backends/device/device_identity.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/cuda_ipc.h"
#include "trireme/comm/nccl.h"

namespace trireme {

Group& group_for(Group& group, c10::Device device, std::unique_ptr<Group>& made) {
  if (group.size() == 1 || group.serves(device)) return group;
  if (!device.is_cuda())
    throw ConfigError(
        str("group '", group.name(), "' moves nothing on ", device.str(), ", and for ", group.size(),
            " ranks there are backends for NVIDIA GPUs alone; move the module to the host or to a GPU, or "
            "train on one rank"),
        ErrorCode::kUnsupported);
  const auto shared = comm::ranks_on_one_device(comm::identities_of_all(group, device));
  auto host = group.clone(group.name() + "/gpus");
  made = shared ? make_cuda_ipc_group(std::move(host), device) : make_nccl_group(std::move(host), device);
  if (group.rank() == 0)
    log(LogLevel::kInfo, str("comm: ", shared ? "CUDA IPC" : "NCCL", " among the GPUs of ", group.size(), " ranks"));
  return *made;
}

}  // namespace trireme
