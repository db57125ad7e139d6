// Memory that is registered with a communicator of its own, and what moves between such memory alone.
//
// The communicator is another one than that of all other calls: NCCL wants both ends of a call to be registered, on all
// ranks, or none; and it tells by the address alone.
#pragma once

#include "comm/backends/nccl/nccl_comm.h"

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/backends/nccl/nccl_memory.h"

namespace trireme::comm {

class RegisteredMemory : public std::enable_shared_from_this<RegisteredMemory> {
 public:
  RegisteredMemory(const NcclApi& api, std::unique_ptr<NcclComm> comm);
  /// Frees what was dropped, for which it waits for the device.
  ~RegisteredMemory();

  /// [bytes] on `device`, which may outlive this. Throws CommError: NCCL's.
  at::Tensor zeros(int64_t bytes, c10::Device device);
  /// Whether `bytes` from `data` on are of one such tensor.
  bool has(const std::byte* data, int64_t bytes) const;
  /// Whether all tensors were dropped.
  bool is_idle() const;
  /// Keeps the memory of these tensors for good: from here on it is never freed.
  void abandon() noexcept { *abandoned_ = true; }
  NcclComm& comm() { return *comm_; }

 private:
  class Lease;
  struct Range {
    const std::byte* begin;
    int64_t bytes;
  };

  const NcclApi& api_;
  const std::shared_ptr<std::atomic<bool>> abandoned_;  // shared with memory that outlives this
  mutable std::mutex mutex_;
  std::vector<Range> held_;                           // guarded by mutex_; by tensors
  std::vector<std::unique_ptr<NcclMemory>> dropped_;  // guarded by mutex_
  const std::unique_ptr<NcclComm> comm_;              // goes first: what it knows is there until then
};

}  // namespace trireme::comm
