// The parts that the queues of one group share: the fabric, and the state of the group, whose first error the peers are
// told.
#pragma once

#include <memory>
#include <string>

#include "comm/fabric/fabric.h"
#include "comm/group_state.h"

namespace trireme::comm {

class FabricState final : public GroupState {
 public:
  FabricState(std::shared_ptr<Segment> segment, GroupInfo group, Fabric::LastSeen last_seen_in_parent)
      : GroupState(std::move(group)), fabric_(std::move(segment), info(), std::move(last_seen_in_parent)) {}

  Fabric& fabric() { return fabric_; }

  std::exception_ptr lost_peer(Look look, const std::function<std::string()>& what, double elapsed_s) override {
    return fabric_.lost_peer(look == Look::kProcesses, what, elapsed_s);
  }
  bool warn_of_stopped(const std::function<std::string()>& what, double elapsed_s) override {
    return fabric_.warn_of_stopped(what, elapsed_s);
  }
  bool has_left(int peer) const override { return fabric_.control(peer).state.load() == RankState::kLeft; }

 private:
  void tell_peers(ErrorCode code, const std::string& cause) noexcept override { fabric_.abort(code, cause); }

  Fabric fabric_;
};

}  // namespace trireme::comm
