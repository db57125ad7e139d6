// The backend over shared memory: collectives and messages by queues of their own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "comm/fabric/collective_queue.h"
#include "comm/fabric/fabric_state.h"
#include "comm/fabric/message_queue.h"
#include "comm/memory.h"

namespace trireme::comm {

class FabricBackend final : public Backend, private MemorySharing {
 public:
  /// Joins the group whose control segment is `segment`. `provider` makes the memory of share() and split().
  FabricBackend(std::shared_ptr<MemoryProvider> provider, std::shared_ptr<Segment> segment, GroupInfo group,
                Fabric::LastSeen last_seen_in_parent = {});
  ~FabricBackend() override;

  Pending<void> submit(Request request) override;
  std::unique_ptr<Backend> split(const Split& split) override;
  MemorySharing* memory_sharing() override { return this; }

 private:
  FabricBackend(std::shared_ptr<MemoryProvider> provider, std::shared_ptr<FabricState> fabric_state);

  std::shared_ptr<SharedMemory> share(size_t bytes, Share mode) override;
  void notify() noexcept override { fabric_state_->fabric().notify(); }
  void wait_slowly(const std::function<bool()>& ready, const WaitReason& reason) override;

  /// By rank: the segment that each rank has made, this one of `own_bytes` (0: none), where `opens` says that this rank
  /// maps it, else null.
  std::vector<std::shared_ptr<Segment>> exchange_segments(const Call& call, size_t own_bytes,
                                                          const std::function<bool(int rank)>& opens);
  /// `records` [size]: this rank's is filled in, the others' are received.
  template <class Record>
  void exchange(const Call& call, std::vector<Record>& records);

  const std::shared_ptr<MemoryProvider> provider_;   // shared with groups split from this one
  const std::shared_ptr<FabricState> fabric_state_;  // state(); shared: pending operations may outlive the group
  const std::shared_ptr<CollectiveQueue> collectives_;
  const std::shared_ptr<MessageQueue> messages_;
};

}  // namespace trireme::comm
