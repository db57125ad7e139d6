// A thread for work in the background, which the program's signals do not reach.
#pragma once

#include <functional>
#include <thread>

namespace trireme {

class Worker {
 public:
  ~Worker() { join(); }
  /// Runs `body` in a thread with fresh thread-local state and all signals blocked, so that handlers run in the
  /// program's own threads. Does nothing where one was started and not joined.
  void start_once(const std::function<void()>& body);
  void join() noexcept {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace trireme
