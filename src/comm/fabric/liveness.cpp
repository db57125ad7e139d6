#include "comm/fabric/liveness.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace trireme::comm {

namespace {

/// /proc/PID/stat from its third field, the state, on; nullptr: there is no such process.
const char* stat_from_state(int64_t pid, char (&text)[1024]) noexcept {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/%lld/stat", static_cast<long long>(pid));
  const int fd = ::open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return nullptr;
  const ssize_t got = ::read(fd, text, sizeof(text) - 1);
  ::close(fd);
  if (got <= 0) return nullptr;
  text[got] = 0;
  const char* bracket = std::strrchr(text, ')');  // the command's name may hold spaces and brackets
  return bracket && bracket[1] != 0 ? bracket + 2 : nullptr;
}

}  // namespace

int64_t start_time_of(int64_t pid) noexcept {
  char text[1024];
  const char* field = stat_from_state(pid, text);
  if (!field || *field == 'Z' || *field == 'X') return -1;
  for (int index = 3; index < 22; ++index) {
    field = std::strchr(field, ' ');
    if (!field) return -1;
    ++field;
  }
  return std::strtoll(field, nullptr, 10);
}

bool is_stopped(int64_t pid) noexcept {
  char text[1024];
  const char* state = stat_from_state(pid, text);
  return state && (*state == 'T' || *state == 't');
}

ProcessWatch::ProcessWatch(int64_t pid, int64_t start_time) : pid_(pid), start_time_(start_time) {
#ifdef SYS_pidfd_open
  pidfd_ = static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0U));
#endif
  // The pid may have ended and been given away before it was opened.
  if (pidfd_ >= 0 && start_time_of(pid) != start_time) {
    ::close(pidfd_);
    pidfd_ = -1;
  }
}

ProcessWatch::~ProcessWatch() {
  if (pidfd_ >= 0) ::close(pidfd_);
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : pid_(std::exchange(other.pid_, 0)), start_time_(other.start_time_), pidfd_(std::exchange(other.pidfd_, -1)) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(start_time_, other.start_time_);
  std::swap(pidfd_, other.pidfd_);
  return *this;
}

bool ProcessWatch::dead() const noexcept {
  if (pid_ <= 0) return false;
  if (pidfd_ < 0) return start_time_of(pid_) != start_time_;
  pollfd poll{.fd = pidfd_, .events = POLLIN, .revents = 0};
  return ::poll(&poll, 1, 0) > 0;
}

}  // namespace trireme::comm
