// What the queues of one group share: the fabric, and the state of the group, whose first error the peers are told.
#pragma once

#include <memory>
#include <string>

#include "comm/fabric/fabric.h"
#include "comm/group_state.h"

namespace trireme::comm {

class Engine final : public GroupState {
 public:
  Engine(std::shared_ptr<Segment> segment, const FabricOptions& options)
      : GroupState(options.place, options.name), fabric_(std::move(segment), options) {}

  Fabric& fabric() { return fabric_; }

  std::exception_ptr lost_peer(Look look, const std::function<std::string()>& what, double elapsed_s) override {
    return fabric_.lost_peer(look == Look::kProcesses, what, elapsed_s);
  }
  bool has_left(int peer) const override { return fabric_.control(peer).state.load() == RankState::kLeft; }
  int rank_in_world(int rank) const override { return fabric_.rank_in_world(rank); }

 private:
  void tell_peers(ErrorCode code, const std::string& cause) noexcept override { fabric_.abort(code, cause); }

  Fabric fabric_;
};

}  // namespace trireme::comm
