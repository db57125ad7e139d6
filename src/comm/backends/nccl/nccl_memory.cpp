#include "comm/backends/nccl/nccl_memory.h"

#include <c10/core/DeviceGuard.h>

#include <utility>

#include "trireme/base/error.h"
#include "trireme/device/device.h"
#include "trireme/device/stream.h"

namespace trireme::comm {

NcclMemory::NcclMemory(const NcclApi& api, c10::Device device, int64_t bytes,
                       std::shared_ptr<const std::atomic<bool>> abandoned)
    : api_(api), device_(device), bytes_(bytes), abandoned_(std::move(abandoned)) {
  const c10::DeviceGuard on(device_);
  ncclResult_t result = api_.mem_alloc(&data_, static_cast<size_t>(bytes_));
  if (result != ncclSuccess) {
    give_back_idle_memory(device_);
    result = api_.mem_alloc(&data_, static_cast<size_t>(bytes_));
  }
  if (result != ncclSuccess)
    throw CommError(ErrorCode::kPeerLost,
                    str("ncclMemAlloc of ", bytes, " bytes failed on ", device.str(),
                        "; NCCL says: ", api_.get_error_string(result),
                        " (set trireme.register_buffers to false, or at stage 3 trireme.live_bytes lower)"));
}

NcclMemory::~NcclMemory() {
  if (*abandoned_) return;
  wait_quietly(device_);
  (void)api_.mem_free(data_);  // makes the device current itself
}

}  // namespace trireme::comm
