// Ranks as processes, for what threads cannot show: death, SIGSTOP, separate address spaces.
//
// The ranks are forked from a helper process that the test executable forks before anything else runs. The helper never
// starts a thread, so its children inherit no half-held locks (a fork of a process with a live OpenMP pool deadlocks).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

/// Forks the helper. Called first thing in main().
void start_process_helper();

struct ProcessOptions {
  std::chrono::milliseconds comm_timeout = std::chrono::seconds(60);  ///< of the ranks' world group
  std::chrono::milliseconds limit = std::chrono::seconds(60);         ///< ranks that run longer are killed
  int signal = 0;                                                     ///< sent to `signalled_rank`; 0: none
  int signalled_rank = 0;
  std::chrono::milliseconds signal_after = std::chrono::milliseconds(0);  ///< counted from the last rank's init()
  std::string argument = {};                                              ///< handed to the body
};

struct ProcessResult {
  int exit_code = -1;  ///< -1: ended by `signal`
  int signal = 0;
  double seconds = 0;      ///< from the start of all ranks to this one's end
  std::string error_text;  ///< what it wrote to stderr, the what() of its exception last
};

/// Runs on every rank with the world that init() found. Returns the exit code. No captures: it runs in another process.
using ProcessBody = int (*)(Group& world, const std::string& argument);

/// Starts `size` ranks as a launcher does and collects them; kills what is stopped when only stopped ones are left.
/// An exception that leaves the body ends its rank with exit code 1 and its text on stderr.
std::vector<ProcessResult> run_processes(int size, ProcessBody body, const ProcessOptions& options = {});

}  // namespace trireme
