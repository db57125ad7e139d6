// Memory of NCCL's own allocator, which it can map into peers and into switches.
#pragma once

#include "comm/backends/nccl/nccl_api.h"

#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace trireme::comm {

class NcclMemory {
 public:
  /// Once `abandoned`, it is never freed. Throws CommError: what NCCL says, such as that there is too little.
  NcclMemory(const NcclApi& api, c10::Device device, int64_t bytes, std::shared_ptr<const std::atomic<bool>> abandoned);
  /// Waits for the device: unlike libtorch's this memory is gone at once.
  ~NcclMemory();
  NcclMemory(const NcclMemory&) = delete;
  NcclMemory& operator=(const NcclMemory&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  int64_t bytes() const { return bytes_; }

 private:
  const NcclApi& api_;
  const c10::Device device_;
  const int64_t bytes_;
  const std::shared_ptr<const std::atomic<bool>> abandoned_;
  void* data_ = nullptr;
};

}  // namespace trireme::comm
