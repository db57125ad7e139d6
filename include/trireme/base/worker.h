// A thread for work in the background, which the program's signals do not reach.
#pragma once

#include <sys/types.h>

#include <functional>
#include <thread>

namespace trireme {

/// At most one thread at a time; joined by the destructor.
class Worker {
 public:
  ~Worker() { join(); }
  /// Runs `body` in a thread with fresh thread-local state and all signals blocked, so that handlers run in the
  /// program's own threads. Does nothing where one was started and not joined.
  void start_once(const std::function<void()>& body);
  /// Waits for the thread's end. Does nothing in a forked child, which does not have the thread.
  void join() noexcept;

 private:
  std::thread thread_;
  pid_t process_ = 0;  // that has the thread
};

}  // namespace trireme
