// The transports that move the data of a group, one class each.
//
// A Group checks and counts each call, then hands it over as a Request. The backend numbers it, runs it and records it.
#pragma once

#include <c10/core/Device.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "comm/call.h"
#include "comm/group_state.h"
#include "comm/split.h"
#include "trireme/comm/group.h"

namespace trireme::comm {

/// One rank's side. The destructor ends it locally: no collective, nothing thrown.
class Backend {
 public:
  explicit Backend(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  // shared_ptr: pending operations, and the backend of a group above this one, hold the state too.
  const std::shared_ptr<GroupState>& state() const { return state_; }
  const GroupInfo& info() const { return state_->info(); }

  /// Starts a collective, a barrier or a message, whose tensors are on the host or on device(). Throws the error of a
  /// group that has failed.
  virtual Pending<void> submit(Request request) = 0;
  /// The same for several all-gathers.
  virtual std::vector<Pending<void>> submit_all(std::vector<Request> requests) {
    std::vector<Pending<void>> pending;
    for (Request& request : requests) pending.push_back(submit(std::move(request)));
    return pending;
  }
  /// This rank's side of the group of its part; nullptr where it has none. Collective.
  virtual std::unique_ptr<Backend> split(const Split& split) = 0;
  /// Makes the group unusable here and on all peers.
  virtual void abort(const std::string& reason) noexcept { state_->abort(reason); }

  /// The device whose tensors it moves besides those of the host; the host where there is none.
  virtual c10::Device device() const { return c10::Device(c10::kCPU); }
  virtual MemorySharing* memory_sharing() { return nullptr; }
  virtual BufferRegistration* buffer_registration() { return nullptr; }

 private:
  const std::shared_ptr<GroupState> state_;
};

}  // namespace trireme::comm
