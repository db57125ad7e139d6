// What the queues of one group share: the fabric, and the state of the group, whose first error the peers are told.
#pragma once

#include <exception>
#include <memory>
#include <string>

#include "comm/fabric/fabric.h"
#include "comm/group_state.h"

namespace trireme::comm {

class Engine : public GroupState {
 public:
  Engine(std::shared_ptr<Segment> segment, const FabricOptions& options)
      : GroupState(options.place, options.name), fabric_(std::move(segment), options) {}

  Fabric& fabric() { return fabric_; }

  /// Marks the group dead here and tells peers, if `error` is a CommError. The first one counts.
  void fail(const std::exception_ptr& error) noexcept;
  /// The same for a reason that did not come from the fabric.
  void abort(const std::string& reason) noexcept;

 private:
  void record_failure(ErrorCode code, const std::string& message, const std::string& cause) noexcept;

  Fabric fabric_;
};

}  // namespace trireme::comm
