// NCCL behind a device group: which of its functions does what, and what is folded here instead.
#pragma once

#include "comm/backends/nccl/registered_memory.h"

#include <c10/core/Stream.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "comm/backends/device/transport.h"
#include "trireme/comm/nccl.h"

namespace trireme::comm {

class NcclTransport final : public DeviceTransport, private BufferRegistration {
 public:
  /// Collective over `site.host`. Throws ConfigError: two ranks on one device.
  NcclTransport(const NcclApi& api, const NcclGroupOptions& options, const TransportSite& site);

  void collect(const Request& request) override;
  /// As one group of NCCL calls, which it launches together.
  void gather_all(const std::vector<const Request*>& requests) override;
  void pass(const Request& request) override;
  BufferRegistration* buffer_registration() override { return this; }
  bool is_registered(const Request& request) override;
  std::string problem() noexcept override;
  void release() noexcept override;
  void close() noexcept override;
  void abandon() noexcept override;

 private:
  at::Tensor zeros(int64_t bytes) override;
  void all_reduce(const Request& request);
  void reduce_scatter(const Request& request);
  void all_gather(const Request& request);
  void broadcast(const Request& request);
  void all_to_all(const Request& request);
  void gather(const Request& request);
  void scatter(const Request& request);

  /// That of `request`, or of several that are alike in this.
  NcclComm& comm_of(const Request& request);
  std::shared_ptr<RegisteredMemory> registered();
  /// Whether NCCL's own reduction keeps the contract of `request`, but for the order of its sums.
  bool reduces_natively(const Request& request) const;
  /// This rank's shard of the fold of all inputs, into `output`.
  void fold_shard(const Request& request, const at::Tensor& output);
  class Batch;
  /// `output` [n] of everybody's shards, this rank's being at `own`.
  void gather_shards(const Batch& batch, const Request& request, std::byte* output, const std::byte* own) const;

  /// One group of NCCL calls on the current stream. `body` gets a Batch.
  template <class Body>
  void enqueue(NcclComm& comm, const Call& call, const Body& body);
  /// The communicator of messages from one rank to another; made when first needed, for `call`, which meets the other.
  NcclComm& lane(int from, int to, const Call& call);
  ShardRange shard(const Request& request, int rank) const {
    return shard_range(request.call.numel, place_.size, rank);
  }

  const NcclApi& api_;
  const NcclGroupOptions options_;
  const Place place_;
  const c10::Device device_;
  GroupState& state_;
  Group& host_;  // of the program's thread
  /// Carries the ids of lanes only, so that they do not mix with the program's messages.
  const std::unique_ptr<Group> ids_;
  const std::unique_ptr<NcclComm> comm_;
  std::atomic<bool> released_{false};
  std::mutex mutex_;
  std::map<std::pair<int, int>, std::unique_ptr<NcclComm>> lanes_;  // guarded by mutex_
  std::shared_ptr<RegisteredMemory> registered_;                    // guarded by mutex_; null before it is asked for
};

}  // namespace trireme::comm
