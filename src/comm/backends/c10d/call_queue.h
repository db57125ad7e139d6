// Calls of one group that come one after the other: run by a thread of the queue, so that none needs its caller.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/backends/c10d/link.h"
#include "trireme/base/worker.h"

namespace trireme::comm {

class CallQueue : public std::enable_shared_from_this<CallQueue> {
 public:
  using Body = std::function<void(Link&, const Request&)>;
  explicit CallQueue(std::shared_ptr<Link> link) : link_(std::move(link)) {}

  /// Numbers `request` and queues it. A `body` that throws a CommError ends the group.
  std::shared_ptr<Pending<void>::Operation> submit(Request request, Body body);
  /// Whether all calls are complete.
  bool is_idle();
  /// Ends the thread; calls not yet complete end with a StateError. After Wire::cancel().
  void shutdown() noexcept;

 private:
  struct QueuedCall;
  using Lock = std::unique_lock<std::mutex>;
  void work();
  void run_front(Lock& lock);

  const std::shared_ptr<Link> link_;  // shared: pending operations may outlive the group

  std::mutex mutex_;  // guards everything below
  std::condition_variable work_;
  std::condition_variable progress_;
  std::deque<std::shared_ptr<QueuedCall>> queue_;  // shared with Pending: either may go first
  std::vector<std::shared_ptr<QueuedCall>> retired_;
  int64_t next_seq_ = 1;
  bool stopped_ = false;
  Worker worker_;
};

}  // namespace trireme::comm
