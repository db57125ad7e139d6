// Both ends of the channel between a rank and its launcher in one process, which is the rank.
#pragma once

#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>

#include "trireme/base/launcher_channel.h"

namespace trireme {

class LauncherEnds {
 public:
  LauncherEnds() {
    socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends_);
    setenv(kLauncherVariable, launcher_address(ends_[1]).c_str(), 1);
  }
  ~LauncherEnds() {
    unsetenv(kLauncherVariable);
    close_launchers();
    close_ranks();
  }
  LauncherEnds(const LauncherEnds&) = delete;
  LauncherEnds& operator=(const LauncherEnds&) = delete;

  std::optional<PeerFailure> told() const { return told_by_rank(ends_[0]).failure; }
  int ranks() const { return ends_[1]; }
  void close_launchers() { close_once(ends_[0]); }
  void close_ranks() { close_once(ends_[1]); }

 private:
  static void close_once(int& end) {
    if (end >= 0) close(end);
    end = -1;
  }

  int ends_[2];
};

}  // namespace trireme
