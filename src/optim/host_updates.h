// Updates of offloaded units by a thread beside the program, which enqueues the next forward and backward meanwhile.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

#include "trireme/pager/pager.h"

namespace trireme {

class HostUpdates {
 public:
  /// `pager` outlives it.
  explicit HostUpdates(Pager& pager);
  /// Finishes the updates that were enqueued.
  ~HostUpdates();
  HostUpdates(const HostUpdates&) = delete;
  HostUpdates& operator=(const HostUpdates&) = delete;

  /// `update` of the owned slice of `unit` runs as soon as this is there, and then the unit is published. Of units that
  /// are there the first is updated first: forward needs it soonest. What `update` throws reaches who needs a unit
  /// next.
  void enqueue(ClosedWindow& window, int unit, std::function<void()> update);

 private:
  void run(int threads);
  /// The unit to update next.
  int next() const;

  Pager& pager_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<int, std::function<void()>> waiting_;  // by unit
  bool ends_ = false;
  std::thread thread_;  // the last member: it uses the others
};

}  // namespace trireme
