// Runs a rank's collectives in the order of the calls: in the caller that waits, else in a background thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/fabric/algorithm.h"
#include "comm/fabric/fabric_state.h"
#include "comm/fabric/step_runner.h"
#include "trireme/base/worker.h"

namespace trireme::comm {

class CollectiveQueue : public std::enable_shared_from_this<CollectiveQueue> {
 public:
  explicit CollectiveQueue(std::shared_ptr<FabricState> fabric_state);

  /// Gives `request` the next sequence number and queues it. A call of one step that is alone is posted at once, so
  /// that peers need not wait for this rank's wait(); taking in what peers posted is left to wait().
  std::shared_ptr<Pending<void>::Operation> submit(Request request, std::unique_ptr<Algorithm> algorithm);
  /// Ends the background thread; calls not yet complete end with a StateError. After Fabric::cancel().
  void shutdown() noexcept;

 private:
  struct QueuedCall;
  using Lock = std::unique_lock<std::mutex>;

  void complete(QueuedCall& call);
  bool done_or_hurry(QueuedCall& call) noexcept;
  /// Returns what the call ended with, null if it succeeded.
  std::exception_ptr run_front(Lock& lock, Patience patience);
  void want_background(const Lock& lock);
  void work();

  const std::shared_ptr<FabricState> fabric_state_;  // shared with the group and the message queue
  StepRunner runner_;                                // used by whoever runs the front call

  std::mutex mutex_;  // guards everything below
  std::condition_variable work_;
  std::condition_variable progress_;
  std::deque<std::shared_ptr<QueuedCall>> queue_;  // shared with Pending: either may go first
  std::vector<std::shared_ptr<QueuedCall>> retired_;
  int64_t next_seq_ = 1;
  int64_t next_step_ = 0;
  int waiters_ = 0;
  bool running_ = false;     ///< somebody runs the front call
  bool background_ = false;  ///< the worker should
  bool stopped_ = false;
  Worker worker_;
};

}  // namespace trireme::comm
