// The Group over shared memory: checks arguments, then hands calls to the queues.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/fabric/collective_queue.h"
#include "comm/fabric/engine.h"
#include "comm/fabric/message_queue.h"
#include "comm/memory.h"

namespace trireme::comm {

class FabricGroup final : public StatefulGroup {
 public:
  /// Joins the group whose control segment is `segment`. `provider` makes the memory of share() and split().
  FabricGroup(std::shared_ptr<MemoryProvider> provider, std::shared_ptr<Segment> segment, const FabricOptions& options);
  ~FabricGroup() override;

  int rank() const override { return engine_->place().rank; }
  int size() const override { return engine_->place().size; }
  const std::string& name() const override { return engine_->fabric().name(); }

  Pending<void> all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  Pending<void> reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override;
  Pending<void> all_gather(const at::Tensor& output, const at::Tensor& input) override;
  Pending<void> broadcast(const at::Tensor& tensor, int root) override;
  Pending<void> all_to_all(const at::Tensor& output, const at::Tensor& input) override;
  Pending<void> gather(const at::Tensor& output, const at::Tensor& input, int root) override;
  Pending<void> scatter(const at::Tensor& output, const at::Tensor& input, int root) override;
  Pending<void> send(const at::Tensor& tensor, int peer) override;
  Pending<void> recv(const at::Tensor& tensor, int peer) override;
  void barrier() override;

  std::unique_ptr<Group> split(const std::vector<int>& members, const std::string& name) override;
  bool shares_memory() const override { return true; }
  std::shared_ptr<SharedMemory> share(size_t bytes, Share mode) override;

  void notify() noexcept override { engine_->fabric().notify(); }
  void abort(const std::string& reason) noexcept override { engine_->abort(reason); }
  std::chrono::milliseconds timeout() const override { return engine_->fabric().timeout(); }
  CommCounters counters() const override { return engine_->counters(); }
  std::string flight_record() const override { return engine_->recorder().text(); }
  std::shared_ptr<GroupState> state() const override { return engine_; }

 protected:
  void wait_slowly(const std::function<bool()>& ready, const WaitReason& reason) override;

 private:
  Pending<void> submit(Request request);
  /// Every rank's segment (kOne: rank 0's) opened by every rank in `readers`; null for ranks that make none.
  std::vector<std::shared_ptr<Segment>> exchange_segments(const Call& call, size_t own_bytes,
                                                          const std::vector<int>& readers);
  /// `records` [size]: this rank's is filled in, the others' are received.
  template <class Record>
  void exchange(const Call& call, std::vector<Record>& records);

  const std::shared_ptr<MemoryProvider> provider_;  // shared with groups split from this one
  const std::shared_ptr<Engine> engine_;            // shared: pending operations may outlive the group
  const std::shared_ptr<CollectiveQueue> collectives_;
  const std::shared_ptr<MessageQueue> messages_;
};

}  // namespace trireme::comm
