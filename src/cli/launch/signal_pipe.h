// SIGINT, SIGTERM and SIGHUP as bytes in a pipe, so that a poll loop can wait for them beside everything else.
#pragma once

#include <array>
#include <csignal>

#include "cli/launch/rank_process.h"

namespace trireme::cli {

/// Catches the three signals while it lives; one that was ignored before (nohup) stays ignored. One at a time per
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
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};

  Pipe pipe_;
  std::array<struct sigaction, 3> before_{};
};

}  // namespace trireme::cli
