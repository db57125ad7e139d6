// The Group over a process group of torch.distributed: checks arguments, then hands calls to queues.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "comm/backends/c10d/call_queue.h"
#include "comm/backends/c10d/link.h"

namespace trireme::comm {

class C10dGroup final : public StatefulGroup {
 public:
  /// `next_number`: of the groups split from the same one, as this rank knows.
  C10dGroup(std::shared_ptr<Link> link, std::shared_ptr<std::atomic<int>> next_number);
  ~C10dGroup() override;

  int rank() const override { return link_->place().rank; }
  int size() const override { return link_->place().size; }
  const std::string& name() const override { return link_->name(); }

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
  bool shares_memory() const override { return false; }
  std::shared_ptr<SharedMemory> share(size_t bytes, Share mode) override;

  void notify() noexcept override {}
  void abort(const std::string& reason) noexcept override { link_->abort(reason); }
  std::chrono::milliseconds timeout() const override { return link_->wire().timeout(); }
  CommCounters counters() const override { return link_->counters(); }
  std::string flight_record() const override { return link_->recorder().text(); }
  std::shared_ptr<GroupState> state() const override { return link_; }

 protected:
  void wait_slowly(const std::function<bool()>& ready, const WaitReason& reason) override;

 private:
  Pending<void> submit(Request request, CallQueue::Body body);
  /// Messages with one peer in one direction wait for each other only.
  Pending<void> submit_message(Request request, CallQueue::Body body);

  const std::shared_ptr<Link> link_;                       // shared: pending operations may outlive the group
  const std::shared_ptr<std::atomic<int>> next_number_;    // shared with groups split from this one
  const std::shared_ptr<CallQueue> collectives_;           // shared with pending operations
  std::vector<std::shared_ptr<CallQueue>> message_lanes_;  // sends by peer, then receives by peer; made when needed
};

}  // namespace trireme::comm
