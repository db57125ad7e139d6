// Memory of GPUs that all ranks of a group can reach: each rank allocates a part and opens those of its peers.
#pragma once

#include "comm/backends/cuda_ipc/cuda_api.h"

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "comm/call.h"

namespace trireme::comm {

class IpcMemory {
 public:
  /// In the current context, `bytes` on every rank. Collective over `host`, which shares memory.
  /// Throws    ConfigError, on every rank: a device that cannot reach a peer's memory. IoError: no memory.
  IpcMemory(const CudaApi& api, CUcontext context, Group& host, size_t bytes);
  /// Local: the part goes when every peer has closed it, which may be later.
  ~IpcMemory();
  IpcMemory(const IpcMemory&) = delete;
  IpcMemory& operator=(const IpcMemory&) = delete;

  /// Rank `rank`'s part.
  std::byte* of(int rank) const { return reinterpret_cast<std::byte*>(parts_[static_cast<size_t>(rank)]); }

 private:
  struct Offer;
  void allocate(Group& host, size_t bytes);
  void open(const std::vector<Offer>& offers);
  void give_back() noexcept;
  void agree(Group& host, const std::string& problem) const;

  const CudaApi& api_;
  const CUcontext context_;
  const GroupInfo info_;
  const std::shared_ptr<SharedMemory> closed_;  // by rank: how many peers have closed its part
  std::vector<CUdeviceptr> parts_;              // by rank; 0: none
  std::vector<int> opened_;                     // of parts_, by this rank
};

}  // namespace trireme::comm
