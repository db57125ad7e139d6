// Starts the ranks of a job on this host, passes their output on, and ends all of them when one fails.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cli/launch/launch_plan.h"
#include "cli/launch/line_relay.h"
#include "cli/launch/orphan_guard.h"
#include "cli/launch/rank_process.h"
#include "cli/launch/signal_pipe.h"
#include "cli/launch/verdict.h"

namespace trireme::cli {

/// The ranks whose lines open with "[rank 1] ".
enum class Prefix {
  kAll,
  kAllButFirst,  ///< rank 0's bytes pass as they come, so that its progress bar works
  kNone,
};

struct SupervisorOptions {
  std::string name = "trireme launch";  ///< opens the supervisor's own lines
  Prefix prefix = Prefix::kAll;
  /// From SIGTERM to SIGKILL; and how long ranks may go on after a signal that was forwarded and the first of them
  /// ended.
  std::chrono::milliseconds grace = std::chrono::seconds(15);
  /// How long a rank that another one blames may take to end by itself, so that its own error is seen.
  std::chrono::milliseconds settle = std::chrono::seconds(2);
  std::string log_dir = {};  ///< folder for rank-N.log, all that rank N writes; empty: none
  size_t tail_lines = 20;    ///< of a failed rank, repeated at the end
  int out = 1;               ///< where the ranks' stdout goes
  int err = 2;               ///< where their stderr and the supervisor's own lines go
};

/// Runs one job. Use it once.
///
/// The first rank that ends with a code other than 0 ends the job: the others get SIGTERM and, after `grace`, SIGKILL.
/// SIGINT, SIGTERM and SIGHUP are passed to all ranks; a second one starts the same grace, a third kills. SIGUSR1 asks
/// for a save: it is passed to ranks that handle it, and ends none. What a rank leaves running in its process group is
/// killed when it ends.
class Supervisor {
 public:
  Supervisor(std::vector<RankCommand> commands, const SupervisorOptions& options);

  /// Returns when every rank has ended and all of its output is written, the report of a failure last. Output that
  /// stdout did not take, a full disk for example, is a failure too, with code 1 where every rank was well.
  ///
  /// Requires  no other SignalPipe; the calling thread is the one whose death ends the ranks.
  /// Throws    ConfigError: a program that is not there, a folder for logs that cannot be written to. IoError: the
  ///           system cannot start a rank (those started are ended).
  Verdict run();

 private:
  using Clock = std::chrono::steady_clock;

  enum class Phase {
    kRunning,      ///< no rank has failed
    kSettling,     ///< one has; others may end by themselves until the deadline
    kTerminating,  ///< SIGTERM was sent; SIGKILL follows at the deadline
    kKilling,      ///< SIGKILL was sent
  };

  struct Stream {
    Fd* from;
    int to;
    LineRelay relay;
    OutputTail tail;
    Fd* log;  // its rank's
  };

  struct RunningRank {
    RankProcess process;
    Fd log;  // not open without a folder for logs
    Stream out;
    Stream err;
    RankEnd end;
    bool has_ended = false;
  };

  void start();
  void poll_once();
  size_t read_stream(Stream& stream);
  void drain(Stream& stream);
  void relay(int fd, const std::string& text);
  void keep(Fd& log, std::string_view text);
  void reap_ended();
  void on_end(RunningRank& rank);
  void on_signal(int number);
  void on_deadline();
  void enter(Phase phase, std::chrono::milliseconds time_left);
  void terminate();
  void signal_all(int number);
  bool any_running() const;
  int milliseconds_to_wait() const;

  std::vector<RankCommand> commands_;
  SupervisorOptions options_;
  SignalPipe signals_;
  OrphanGuard guard_;
  std::vector<std::unique_ptr<RunningRank>> ranks_;  // unique_ptr: streams point into their process
  Phase phase_ = Phase::kRunning;
  std::optional<Clock::time_point> deadline_;
  int signals_seen_ = 0;
  int first_signal_ = 0;
  int ended_ = 0;
  int lost_output_ = 0;  // the errno of a write of the ranks' stdout that failed while somebody could have read it
  char last_byte_[2] = {'\n', '\n'};  // of out and err: a prefixed line must not begin in the middle of another
};

}  // namespace trireme::cli
