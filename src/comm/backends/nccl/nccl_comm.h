// One communicator of NCCL, in its non-blocking form: whatever NCCL does, a call can be ended from another thread.
#pragma once

#include "comm/backends/nccl/nccl_api.h"

#include <functional>
#include <mutex>
#include <string>

#include "comm/backends/nccl/nccl_memory.h"
#include "comm/call.h"

namespace trireme::comm {

class NcclComm {
 public:
  /// Called while NCCL is at something that needs peers; what it throws ends the wait.
  using Poll = std::function<void()>;
  /// On the current device. Returns when all `place.size` ranks that have `id` are there.
  NcclComm(const NcclApi& api, const ncclUniqueId& id, const Place& place, const Poll& poll);
  ~NcclComm();
  NcclComm(const NcclComm&) = delete;
  NcclComm& operator=(const NcclComm&) = delete;

  /// Runs `enqueue` as one group of NCCL and returns when all of it is on its stream. The first time NCCL connects to
  /// peers, and this waits for them. `what` for errors. Throws CommError: NCCL's, or abort() was called.
  void enqueue(const char* what, const std::function<void(ncclComm_t)>& calls);
  /// Within `calls` of enqueue().
  void check(ncclResult_t result, const char* what) const;

  /// From now on calls here move `memory` without a copy through NCCL's own buffers, until this is gone: to take it
  /// back before would be to wait for peers. Throws CommError: NCCL's, or abort() was called.
  void register_memory(const NcclMemory& memory);

  /// The error that NCCL found in the background; empty: none.
  std::string problem() noexcept;
  /// Ends what is under way and all that comes. Any thread.
  void abort() noexcept;
  /// Everything has run. Gives NCCL a moment to part from peers in good order.
  void close() noexcept;

 private:
  std::string text_of(ncclResult_t result) const;
  /// Waits until NCCL is through with what it was told last.
  void settle(const char* what, const Poll& poll);
  ncclResult_t progress();

  const NcclApi& api_;
  std::mutex mutex_;
  ncclComm_t comm_ = nullptr;  // guarded by mutex_; null after abort() or close()
};

}  // namespace trireme::comm
