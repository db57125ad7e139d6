// Ctrl-C as a flag that a training loop looks at between two steps.
#pragma once

#include <array>
#include <csignal>

namespace trireme::cli {

/// Catches SIGINT, SIGTERM and SIGHUP while it lives. The first one only sets the flag; the second ends the process at
/// once, as if nobody had caught it. A signal that was ignored before (nohup) stays ignored. One at a time per process.
class InterruptFlag {
 public:
  InterruptFlag();
  ~InterruptFlag();
  InterruptFlag(const InterruptFlag&) = delete;
  InterruptFlag& operator=(const InterruptFlag&) = delete;

  /// The first signal that came; 0 before.
  int signal() const noexcept;

 private:
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, 3> before_{};
};

}  // namespace trireme::cli
