// The backend of ranks with a device each: tensors on that device go by a transport, tensors on the host by the group
// beneath. One state, one record and one count of calls for both.
//
// The main idea: a call on the device is enqueued on a stream of the group between two events, and nobody on the host
// waits. Who is late, gone or at something else is seen by an OperationWatch and a CallBoard beside the stream.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/device/call_board.h"
#include "comm/backends/device/message_lane.h"
#include "comm/backends/device/operation_watch.h"
#include "comm/backends/device/transport.h"

namespace trireme::comm {

class DeviceBackend final : public Backend {
 public:
  /// Collective over `host`. Throws ConfigError where `host` or `device` cannot serve, and what `make_transport`
  /// throws.
  DeviceBackend(std::unique_ptr<Group> host, c10::Device device, TransportMaker make_transport);
  ~DeviceBackend() override;

  Pending<void> submit(Request request) override;
  std::vector<Pending<void>> submit_all(std::vector<Request> requests) override;
  std::unique_ptr<Backend> split(const Split& split) override;
  void abort(const std::string& reason) noexcept override;
  c10::Device device() const override { return device_; }
  /// That of the transport; memory on a device is not shared, so that the host's sharing is not offered either.
  BufferRegistration* buffer_registration() override { return transport_->buffer_registration(); }

 private:
  /// One collective, or several all-gathers, each of which has a number of its own.
  std::vector<Pending<void>> submit_collectives(std::vector<Request> requests);
  Pending<void> submit_message(Request request);

  const std::unique_ptr<Group> host_;
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
