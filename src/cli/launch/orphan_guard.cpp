#include "cli/launch/orphan_guard.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

constexpr int kMaxGroups = 4096;

// In the guard: only async-signal-safe calls, as after any fork of a process that may have threads.
[[noreturn]] void run_guard(int from_launcher) {
  setsid();  // a Ctrl-C, or a kill of the launcher's group, must not reach the guard
  prctl(PR_SET_NAME, "trireme-guard");
  // The guard must not keep the launcher's output open for whoever reads it to its end.
  for (int fd = 0; fd < 1024; ++fd) {
    if (fd != from_launcher) close(fd);
  }
  static pid_t groups[kMaxGroups];
  int count = 0;
  pid_t message = 0;
  while (true) {
    const auto bytes = recv(from_launcher, &message, sizeof(message), 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes != sizeof(message)) break;
    if (message > 0 && count < kMaxGroups) groups[count++] = message;
    for (int i = 0; message < 0 && i < count; ++i) {
      if (groups[i] == -message) groups[i] = groups[--count];
    }
  }
  for (int i = 0; i < count; ++i) kill(-groups[i], SIGKILL);
  _exit(0);
}

}  // namespace

OrphanGuard::OrphanGuard() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw IoError(str("cannot start the launcher's guard: socketpair: ", std::strerror(errno)));
  }
  const Fd from_launcher(ends[0]);
  to_guard_ = Fd(ends[1]);
  pid_ = fork();
  if (pid_ < 0) throw IoError(str("cannot start the launcher's guard: fork: ", std::strerror(errno)));
  if (pid_ == 0) run_guard(from_launcher.get());
}

OrphanGuard::~OrphanGuard() {
  to_guard_.reset();
  waitpid(pid_, nullptr, 0);
}

void OrphanGuard::watch(pid_t group) const noexcept {
  // It fails only when the guard is gone, and then PR_SET_PDEATHSIG is still there.
  static_cast<void>(send(to_guard_.get(), &group, sizeof(group), MSG_NOSIGNAL));
}

void OrphanGuard::forget(pid_t group) const noexcept { watch(-group); }

}  // namespace trireme::cli
