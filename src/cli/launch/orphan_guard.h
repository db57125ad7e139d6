// Ends the ranks' process groups when the launcher is killed without a chance to do so itself.
#pragma once

#include <sys/types.h>

#include "cli/launch/rank_process.h"

namespace trireme::cli {

/// A small process in a session of its own that waits on a socket whose other end only the launcher holds. When the
/// launcher dies, whatever the reason, the socket closes and the guard sends SIGKILL to every group that it was told of
/// and not told to forget. (A rank itself also dies with its launcher by PR_SET_PDEATHSIG; the guard reaches what the
/// rank has started.)
class OrphanGuard {
 public:
  /// Requires  no rank has been started yet. Throws IoError.
  OrphanGuard();
  ~OrphanGuard();
  OrphanGuard(const OrphanGuard&) = delete;
  OrphanGuard& operator=(const OrphanGuard&) = delete;

  void watch(pid_t group) const noexcept;
  void forget(pid_t group) const noexcept;

 private:
  Fd to_guard_;
  pid_t pid_ = -1;
};

}  // namespace trireme::cli
