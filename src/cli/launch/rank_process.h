// One started rank: its process, its process group and the pipes it writes to.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

#include "cli/launch/launch_plan.h"
#include "trireme/base/launcher_channel.h"

namespace trireme::cli {

/// An owned file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(other.release()) {}
  Fd& operator=(Fd&& other) noexcept {
    reset();
    fd_ = other.release();
    return *this;
  }
  ~Fd() { reset(); }
  int get() const { return fd_; }
  bool is_open() const { return fd_ >= 0; }
  void reset() noexcept;

 private:
  int release() noexcept {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  int fd_ = -1;
};

struct Pipe {
  Fd read_end;
  Fd write_end;
};

/// Both ends are closed by exec. Throws IoError.
Pipe make_pipe();

/// A child process that leads a process group of its own, reads from /dev/null and writes into two pipes. It inherits
/// the channel on which a rank tells its launcher why it ends.
///
/// It gets SIGKILL when the thread that started it dies, so nothing outlives a launcher that was killed.
class RankProcess {
 public:
  /// Throws    IoError: the system cannot start another process. A program that cannot be executed ends with code 127
  ///           (not found) or 126 after a line on its stderr.
  static RankProcess start(const RankCommand& command);

  pid_t pid() const { return pid_; }
  Fd& out() { return out_; }
  Fd& err() { return err_; }
  /// Its words to the launcher since the last call.
  RankReport told() const { return told_by_rank(channel_.get()); }
  /// Readable when the process has ended; not open where the kernel cannot tell (before Linux 5.3).
  const Fd& ended() const { return ended_; }

  /// To the whole process group. Does nothing once the process has been reaped.
  void signal(int number) const noexcept;
  /// To the process alone, where it handles or ignores the signal. False: it does not, or is not the program yet; it
  /// got nothing.
  bool signal_if_handled(int number) const;
  /// True while SIGSTOP or a debugger holds it.
  bool is_stopped() const;
  /// The wait status, once the process has ended; what is left of its group is killed first. Nothing while it runs.
  std::optional<int> reap();

 private:
  RankProcess() = default;

  pid_t pid_ = -1;
  bool reaped_ = false;
  Fd out_;
  Fd err_;
  Fd channel_;
  Fd ended_;
  Fd before_exec_;  // at its end once the process is the program
};

/// The file that `name` stands for: itself with a slash in it, else found along PATH.
///
/// Throws    ConfigError: there is none, it is a folder, or it may not be executed; with the fix.
std::string find_program(const std::string& name);

}  // namespace trireme::cli
