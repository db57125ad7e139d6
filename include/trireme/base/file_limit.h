// The limit on the size of files (`ulimit -f`): a write beyond it fails like any other, instead of ending the process.
#pragma once

#include <csignal>

namespace trireme {

/// While it lives, what this thread writes beyond the limit on the size of files fails with EFBIG; outside, the system
/// sends SIGXFSZ too, which ends a program that does not handle it. The program's own disposition stays as it is: the
/// signal is blocked in this thread and taken back. Keeps errno.
class FileLimitScope {
 public:
  FileLimitScope() noexcept;
  ~FileLimitScope();
  FileLimitScope(const FileLimitScope&) = delete;
  FileLimitScope& operator=(const FileLimitScope&) = delete;

 private:
  sigset_t before_;
};

/// The remedy of an `error` (an errno) of a write, as the end of a message; empty where the system's words say
/// enough.
const char* write_error_fix(int error);

}  // namespace trireme
