// The transports of a device group: NCCL, or memory that the ranks of one GPU map.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/call.h"
#include "comm/group_state.h"

namespace trireme::comm {

/// One rank's side. What it enqueues goes on the stream that is current for the device; the caller orders it.
class DeviceTransport {
 public:
  virtual ~DeviceTransport() = default;

  /// Enqueues this rank's part of a collective. One thread at a time, in the same order on every rank.
  /// Throws CommError: what the transport says. The group is dead then.
  virtual void collect(const Request& request) = 0;
  /// The same for several all-gathers.
  virtual void gather_all(const std::vector<const Request*>& requests) {
    for (const Request* request : requests) collect(*request);
  }
  /// The same for a message: at most one thread per peer and direction, which may wait for the peer's.
  virtual void pass(const Request& request) = 0;

  /// Group::buffer_registration(). Not used while another thread is in collect().
  virtual BufferRegistration* buffer_registration() { return nullptr; }
  /// Whether `collective` moves between such memory alone.
  virtual bool is_registered(const Request&) { return false; }

  /// The error that happened behind this rank's back; empty: none. Any thread.
  virtual std::string problem() noexcept = 0;
  /// Lets what is under way end, whatever becomes of its data, so that streams are free again; calls that are being
  /// made return or throw, later ones throw. Called over and over until all streams are free. Any thread.
  virtual void release() noexcept = 0;
  /// Nothing more will be enqueued and all of it has run.
  virtual void close() noexcept = 0;
  /// The device does not end what it has: nothing that it may still use is ever freed.
  virtual void abandon() noexcept {}
};

/// Where a transport is made.
struct TransportSite {
  Group& host;  ///< the same ranks, on the host; outlives the transport
  GroupState& state;
  c10::Device device;
};
/// Makes the transport of a group, and those of the groups that are split from it. Collective over `site.host`.
using TransportMaker = std::function<std::shared_ptr<DeviceTransport>(const TransportSite& site)>;

}  // namespace trireme::comm
