// SIGINT, SIGTERM, SIGHUP and SIGUSR1 as bytes in a pipe, so that a poll loop can wait for them beside everything else.
#pragma once

#include <array>
#include <csignal>

#include "cli/launch/rank_process.h"

namespace trireme::cli {

/// Catches the four signals while it lives; one that was ignored before (nohup) stays ignored. One at a time per
/// process.
class SignalPipe {
 public:
  SignalPipe();
  ~SignalPipe();
  SignalPipe(const SignalPipe&) = delete;
  SignalPipe& operator=(const SignalPipe&) = delete;

  /// Readable when a signal has come.
  int fd() const { return pipe_.read_end.get(); }
  /// The next signal; 0 when there is none.
  int next() noexcept;

 private:
  static constexpr std::array<int, 4> kSignals = {SIGINT, SIGTERM, SIGHUP, SIGUSR1};

  Pipe pipe_;
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace trireme::cli
