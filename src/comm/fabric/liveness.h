// Whether the process behind a rank still runs.
#pragma once

#include <cstdint>

namespace trireme::comm {

/// Watches one process. Notices its end even while it is a zombie.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  /// `start_time` as start_time_of(pid) gave it on that process's own side: a reused pid counts as dead.
  ProcessWatch(int64_t pid, int64_t start_time);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;

  bool watching() const noexcept { return pid_ > 0; }
  bool dead() const noexcept;

 private:
  int64_t pid_ = 0;
  int64_t start_time_ = 0;
  int pidfd_ = -1;  ///< -1: the kernel has no pidfd_open; /proc is read instead
};

/// Clock ticks after boot at which `pid` was started; -1: there is no such process, or it is a zombie.
int64_t start_time_of(int64_t pid) noexcept;

/// Whether `pid` is stopped, by SIGSTOP or under a debugger.
bool is_stopped(int64_t pid) noexcept;

}  // namespace trireme::comm
