// A thread that is started when there is first something to do in the background.
#pragma once

#include <functional>
#include <thread>

namespace trireme::comm {

class Worker {
 public:
  ~Worker() { join(); }
  /// The thread starts with fresh thread-local state and all signals blocked, so that handlers run in the program's own
  /// threads.
  void start_once(const std::function<void()>& body);
  void join() noexcept {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

}  // namespace trireme::comm
