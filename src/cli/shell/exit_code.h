// Exit statuses of `trireme`. docs/cli.md is the manual.
#pragma once

namespace trireme::cli {

enum ExitCode : int {
  kDone = 0,
  kFailed = 1,         ///< something went wrong while running: a file, a checkpoint, memory
  kWrongUse = 2,       ///< flags, configuration, model or data; nothing was started or written
  kPeerFailed = 3,     ///< another rank died, got stuck or took another path
  kInterrupted = 130,  ///< Ctrl-C: saved and ended cleanly. 128 + signal in general
};

}  // namespace trireme::cli
