// The backend over a process group of torch.distributed: each call is run by the thread of a queue.
#pragma once

#include <memory>
#include <vector>

#include "comm/backend.h"
#include "comm/backends/c10d/call_queue.h"
#include "comm/backends/c10d/group_numbers.h"
#include "comm/backends/c10d/link.h"

namespace trireme::comm {

class C10dBackend final : public Backend {
 public:
  /// `number` is that of the wire's address; `numbers` are of all groups of this rank that were split from one.
  C10dBackend(std::shared_ptr<Link> link, std::shared_ptr<GroupNumbers> numbers, GroupNumbers::Lease number);
  ~C10dBackend() override;

  Pending<void> submit(Request request) override;
  std::unique_ptr<Backend> split(const Split& split) override;

 private:
  /// Messages with one peer in one direction wait for each other only.
  CallQueue& lane_of(const Call& message);

  const std::shared_ptr<Link> link_;             // state(); shared: pending operations may outlive the group
  const std::shared_ptr<GroupNumbers> numbers_;  // shared with groups split from this one
  GroupNumbers::Lease number_;
  const std::shared_ptr<CallQueue> collectives_;           // shared with pending operations
  std::vector<std::shared_ptr<CallQueue>> message_lanes_;  // sends by peer, then receives by peer; made when needed
};

}  // namespace trireme::comm
