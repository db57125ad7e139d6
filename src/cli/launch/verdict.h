// Why a job ended: how each rank ended in, the rank to blame, the exit code and the last words out. Pure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "trireme/base/launcher_channel.h"

namespace trireme::cli {

/// How one rank ended.
struct RankEnd {
  int rank = 0;
  int wait_status = 0;                           ///< as of waitpid()
  int order = 0;                                 ///< 0 ended first
  bool ended_by_launcher = false;                ///< after the launcher had begun to end the job
  bool was_stopped = false;                      ///< by SIGSTOP or a debugger, when the launcher began to end the job
  std::vector<std::string> tail = {};            ///< its last lines: of stderr, or of stdout where that is empty
  std::optional<PeerFailure> peer_failure = {};  ///< the last one that it told the launcher of
  std::string refusal = {};                      ///< the words that it left to the launcher; else empty
};

struct Verdict {
  int exit_code = 0;   ///< of the rank that failed first; 128 + signal for one that a signal killed
  std::string report;  ///< lines for stderr, the failed rank's own last; empty when no rank failed
};

/// A signal's name, "SIGKILL", or its number.
std::string signal_name(int signal);

/// The exit code that stands for `wait_status`: the program's own, or 128 + signal.
int exit_code_of(int wait_status);

/// The rank that failed first: where it told of a peer that failed by itself as well, that peer. Ranks that called
/// different operations name each other, so the first of them stands. `name` opens
/// the lines of the report, e.g. "trireme launch". `ends` holds one entry per rank, in rank order. A rank that ended
/// because of `forwarded`, a signal that the user sent to all (0: none), is no failure to report; one that had to be
/// ended is named, and the code is 128 + forwarded even where all others ended with 0. Words that ranks left to the
/// launcher are shown once, with the ranks that said them; of those that were ended for them nothing is said.
Verdict judge(const std::vector<RankEnd>& ends, const std::string& name, int forwarded = 0);

}  // namespace trireme::cli
