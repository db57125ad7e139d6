#include "cli/launch/rank_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>
#include <vector>

#include "trireme/base/environment.h"
#include "trireme/base/error.h"

extern char** environ;

namespace trireme::cli {
namespace {

[[noreturn]] void fail(const char* operation) {
  throw IoError(str("cannot start a rank: ", operation, ": ", std::strerror(errno)));
}

// The environment of the child: the launcher's own, with the command's variables and the channel's in
// place of those of the same name.
std::vector<std::string> environment_of(RankCommand command, int channel) {
  command.environment.emplace_back(kLauncherVariable, launcher_address(channel));
  std::vector<std::string> merged;
  for (char** entry = environ; *entry; ++entry) {
    const std::string_view text(*entry);
    const auto name = text.substr(0, text.find('='));
    bool replaced = false;
    for (const auto& [key, value] : command.environment) replaced = replaced || name == key;
    if (!replaced) merged.emplace_back(text);
  }
  for (const auto& [key, value] : command.environment) merged.push_back(key + "=" + value);
  return merged;
}

struct Channel {
  Fd launcher_end;
  Fd rank_end;
};

// Messages keep their bounds, and a rank whose launcher is gone gets no signal.
Channel make_channel() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) fail("socketpair");
  return {Fd(ends[0]), Fd(ends[1])};
}

std::vector<char*> pointers_to(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (auto& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

struct ChildSetup {
  pid_t launcher;
  int out;
  int err;
  int channel;
  const char* path;
  char* const* argv;
  char* const* environment;
};

// Between fork and exec: only async-signal-safe calls, since other threads of the launcher may have held locks.
[[noreturn]] void run_child(const ChildSetup& setup) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  // The launcher may have died before prctl() took effect; then nobody would ever send the signal.
  if (getppid() != setup.launcher) _exit(127);
  const int null = open("/dev/null", O_RDONLY);
  dup2(null, STDIN_FILENO);
  dup2(setup.out, STDOUT_FILENO);
  dup2(setup.err, STDERR_FILENO);
  fcntl(setup.channel, F_SETFD, 0);  // exec keeps it open
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const int ignored : {SIGPIPE, SIGXFSZ}) signal(ignored, SIG_DFL);  // `trireme` ignores them: exec hands that on
  execve(setup.path, setup.argv, setup.environment);
  const int reason = errno;
  dprintf(STDERR_FILENO, "cannot execute %s: %s\n", setup.path, strerrordesc_np(reason));
  _exit(reason == ENOENT ? 127 : 126);
}

}  // namespace

void Fd::reset() noexcept {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

Pipe make_pipe() {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC) != 0) fail("pipe");
  return {Fd(ends[0]), Fd(ends[1])};
}

RankProcess RankProcess::start(const RankCommand& command) {
  auto out = make_pipe();
  auto err = make_pipe();
  auto channel = make_channel();
  auto before_exec = make_pipe();
  auto argv = command.argv;
  auto environment = environment_of(command, channel.rank_end.get());
  const auto argv_pointers = pointers_to(argv);
  const auto environment_pointers = pointers_to(environment);
  const std::string path = find_program(command.argv.at(0));
  const ChildSetup setup{.launcher = getpid(),
                         .out = out.write_end.get(),
                         .err = err.write_end.get(),
                         .channel = channel.rank_end.get(),
                         .path = path.c_str(),
                         .argv = argv_pointers.data(),
                         .environment = environment_pointers.data()};
  RankProcess process;
  process.pid_ = fork();
  if (process.pid_ < 0) fail("fork");
  if (process.pid_ == 0) run_child(setup);
  setpgid(process.pid_, process.pid_);  // also here: a signal to the group may come before the child has run
  process.out_ = std::move(out.read_end);
  process.err_ = std::move(err.read_end);
  process.channel_ = std::move(channel.launcher_end);
  process.before_exec_ = std::move(before_exec.read_end);
  for (const int fd : {process.out_.get(), process.err_.get()}) fcntl(fd, F_SETFL, O_NONBLOCK);
#ifdef SYS_pidfd_open
  process.ended_ = Fd(static_cast<int>(syscall(SYS_pidfd_open, process.pid_, 0)));
#endif
  return process;
}

void RankProcess::signal(int number) const noexcept {
  if (!reaped_) kill(-pid_, number);
}

bool RankProcess::signal_if_handled(int number) const {
  constexpr std::string_view kCaught = "SigCgt:", kIgnored = "SigIgn:";  // of one length
  // Between fork and exec the process has the launcher's own handlers.
  pollfd exec{before_exec_.get(), POLLIN, 0};
  if (reaped_ || poll(&exec, 1, 0) != 1) return false;
  std::ifstream file(str("/proc/", pid_, "/status"));
  uint64_t handled = 0;
  for (std::string line; std::getline(file, line);)
    if (line.starts_with(kCaught) || line.starts_with(kIgnored))
      handled |= std::strtoull(line.c_str() + kCaught.size(), nullptr, 16);
  if ((handled >> (number - 1) & 1) == 0) return false;
  kill(pid_, number);
  return true;
}

bool RankProcess::is_stopped() const {
  std::ifstream file(str("/proc/", pid_, "/stat"));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  const auto state = text.rfind(')');  // the name before it may hold anything, blanks and brackets included
  return state != std::string::npos && state + 2 < text.size() && (text[state + 2] == 'T' || text[state + 2] == 't');
}

std::optional<int> RankProcess::reap() {
  siginfo_t info{};
  if (reaped_ || waitid(P_PID, pid_, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) return std::nullopt;
  // Not reaped yet, the process still keeps its number, so the group cannot be a stranger's.
  kill(-pid_, SIGKILL);
  int status = 0;
  waitpid(pid_, &status, 0);
  reaped_ = true;
  return status;
}

std::string find_program(const std::string& name) {
  std::vector<std::string> candidates;
  if (name.find('/') != std::string::npos) {
    candidates.push_back(name);
  } else {
    std::istringstream folders(environment("PATH").value_or("/usr/bin:/bin"));
    for (std::string folder; std::getline(folders, folder, ':');)
      candidates.push_back((folder.empty() ? "." : folder) + "/" + name);
  }
  struct stat info {};
  bool found = false, is_folder = false;
  for (const auto& path : candidates) {
    if (stat(path.c_str(), &info) != 0) continue;
    is_folder = is_folder || S_ISDIR(info.st_mode);
    if (S_ISDIR(info.st_mode)) continue;
    found = true;
    if (access(path.c_str(), X_OK) == 0) return path;
  }
  if (found) throw ConfigError(str("'", name, "' may not be executed; allow it with chmod +x"));
  if (name.find('/') == std::string::npos && stat(name.c_str(), &info) == 0) {
    throw ConfigError(str("there is no program '", name, "' along PATH; for the one in this folder write ./", name));
  }
  throw ConfigError(str("there is no program '", name, "'",
                        is_folder && name.find('/') != std::string::npos ? ": this is a folder; name a file in it"
                                                                         : "; correct its path"));
}

}  // namespace trireme::cli
