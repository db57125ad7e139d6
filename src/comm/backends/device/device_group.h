// The Group of ranks with a device each: tensors on that device go by a transport, tensors on the host by the group
// beneath. One state, one record and one count of calls for both.
//
// The main idea: a call on the device is enqueued on a stream of the group between two marks, and nobody on the host
// waits. Who is late, gone or at something else is seen by an OperationWatch and a CallBoard beside the stream.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/backends/device/call_board.h"
#include "comm/backends/device/message_lane.h"
#include "comm/backends/device/operation_watch.h"
#include "comm/backends/device/transport.h"
#include "comm/group_state.h"

namespace trireme::comm {

class DeviceGroup final : public StatefulGroup {
 public:
  /// Collective over `host`. Throws ConfigError where `host` or `device` cannot serve, and what `make_transport`
  /// throws.
  DeviceGroup(std::unique_ptr<Group> host, c10::Device device, TransportMaker make_transport);
  ~DeviceGroup() override;

  int rank() const override { return state_->place().rank; }
  int size() const override { return state_->place().size; }
  const std::string& name() const override { return state_->name(); }
  bool serves(c10::Device device) const override { return device.is_cpu() || device == device_; }

  Pending<void> all_reduce(const at::Tensor& tensor, ReduceOp op) override;
  Pending<void> reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override;
  Pending<void> all_gather(const at::Tensor& output, const at::Tensor& input) override;
  Pending<void> broadcast(const at::Tensor& tensor, int root) override;
  Pending<void> all_to_all(const at::Tensor& output, const at::Tensor& input) override;
  Pending<void> gather(const at::Tensor& output, const at::Tensor& input, int root) override;
  Pending<void> scatter(const at::Tensor& output, const at::Tensor& input, int root) override;
  Pending<void> send(const at::Tensor& tensor, int peer) override;
  Pending<void> recv(const at::Tensor& tensor, int peer) override;
  /// The ranks meet, on the host; devices go on with what they have.
  void barrier() override { host_->barrier(); }

  bool registers(c10::Device device) const override { return device == device_ && transport_->registers(); }
  at::Tensor registered_zeros(int64_t bytes, c10::Device device) override;

  std::unique_ptr<Group> split(const std::vector<int>& members, const std::string& name) override;
  /// What is on a device is not shared, so that share() is not offered either.
  bool shares_memory() const override { return false; }
  std::shared_ptr<SharedMemory> share(size_t bytes, Share mode) override;

  void notify() noexcept override { host_->notify(); }
  void abort(const std::string& reason) noexcept override;
  std::chrono::milliseconds timeout() const override { return host_->timeout(); }
  CommCounters counters() const override { return state_->counters(); }
  std::string flight_record() const override { return state_->recorder().text(); }
  std::shared_ptr<GroupState> state() const override { return state_; }

 protected:
  std::vector<Pending<void>> gather_each(const std::vector<at::Tensor>& outputs,
                                         const std::vector<at::Tensor>& inputs) override;
  void wait_slowly(const std::function<bool()>& ready, const WaitReason& reason) override {
    host_->wait_until(ready, reason);
  }

 private:
  /// Whether the group beneath has to do it. Throws ShapeError for tensors on two devices, or on another one.
  bool is_for_host(CallKind kind, const at::Tensor& first, const at::Tensor& second = {}) const;
  Pending<void> submit(Request request);
  /// One request, or several all-gathers, each of which has a number of its own.
  std::vector<Pending<void>> submit_all(std::vector<Request> requests);
  Pending<void> submit_message(Request request);

  const std::unique_ptr<Group> host_;
  const std::shared_ptr<GroupState> state_;  // of host_; shared: pending operations may outlive the group
  const c10::Device device_;
  const TransportMaker make_transport_;
  const std::shared_ptr<CallBoard> board_;  // null: ranks share no memory
  const std::shared_ptr<DeviceTransport> transport_;
  const std::shared_ptr<OperationWatch> watch_;
  const SideStream stream_;
  int64_t next_seq_ = 1;
  std::vector<std::unique_ptr<MessageLane>> lanes_;  // sends by peer, then receives by peer; made when needed
};

}  // namespace trireme::comm
