#include "trireme/base/file_limit.h"

#include <pthread.h>

#include <cerrno>
#include <ctime>

namespace trireme {
namespace {

sigset_t size_signal() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGXFSZ);
  return set;
}

}  // namespace

FileLimitScope::FileLimitScope() noexcept {
  const sigset_t set = size_signal();
  pthread_sigmask(SIG_BLOCK, &set, &before_);
}

FileLimitScope::~FileLimitScope() {
  const int error = errno;
  // A thread of the program's own may have blocked the signal to wait for it.
  if (error == EFBIG && sigismember(&before_, SIGXFSZ) == 0) {
    const sigset_t set = size_signal();
    const timespec now{};
    sigtimedwait(&set, nullptr, &now);
  }
  pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

const char* write_error_fix(int error) {
  return error == EFBIG ? "; raise the limit on the size of files (ulimit -f)" : "";
}

}  // namespace trireme
