#include "tests/support/processes.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>

#include "trireme/base/error.h"
#include "trireme/comm/world.h"

namespace trireme {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kMaxRanks = 16;

// Both travel through a socket pair as plain bytes.
struct Order {
  ProcessBody body;
  int size;
  int port;
  int signal;
  int signalled_rank;
  int64_t comm_timeout_ms;
  int64_t limit_ms;
  int64_t signal_after_ms;
  int stderr_fds[kMaxRanks];  ///< of the test process, opened through /proc
  pid_t test_process;
  char argument[256];
};
struct Outcome {
  int exit_code;
  int signal;
  double seconds;
};

struct Helper {
  int socket = -1;
};

Helper& helper() {
  static Helper instance;  // one per process, as the fork at its start is
  return instance;
}

template <class T>
bool transfer(int socket, T& record, bool sends) {
  char* bytes = reinterpret_cast<char*>(&record);
  size_t moved = 0;
  while (moved < sizeof(T)) {
    const ssize_t got =
        sends ? ::write(socket, bytes + moved, sizeof(T) - moved) : ::read(socket, bytes + moved, sizeof(T) - moved);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    moved += static_cast<size_t>(got);
  }
  return true;
}

// Says on `joined` that its init() is over.
[[noreturn]] void run_rank(const Order& order, int rank, int joined) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const std::string path = str("/proc/", order.test_process, "/fd/", order.stderr_fds[rank]);
  const int fd = ::open(path.c_str(), O_WRONLY | O_APPEND);
  if (fd >= 0) ::dup2(fd, STDERR_FILENO);
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", std::to_string(order.size).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(order.port).c_str(), 1);
  ::setenv("TORCH_CPP_LOG_LEVEL", "ERROR", 1);
  int code = 1;
  try {
    World world = init({.timeout = std::chrono::milliseconds(order.comm_timeout_ms)});
    if (::write(joined, "", 1) != 1) throw StateError("the helper process has gone");
    try {
      code = order.body(*world.group, order.argument);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s\n", error.what());
      world.group->abort(error.what());
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "init: %s\n", error.what());
  }
  std::fflush(nullptr);
  ::_exit(code);
}

class Supervisor {
 public:
  explicit Supervisor(const Order& order) : order_(order), start_(Clock::now()) {
    if (::pipe2(joined_, O_CLOEXEC | O_NONBLOCK) != 0) ::_exit(1);
    for (int rank = 0; rank < order.size; ++rank) {
      const pid_t pid = ::fork();
      if (pid == 0) run_rank(order, rank, joined_[1]);
      pids_.push_back(pid);
      stopped_.push_back(false);
      outcomes_.push_back({-1, 0, 0});
    }
  }

  ~Supervisor() {
    ::close(joined_[0]);
    ::close(joined_[1]);
  }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  std::vector<Outcome> run() {
    while (running_ > 0) {
      for (size_t rank = 0; rank < pids_.size(); ++rank) look_after(rank);
      if (!all_joined_ && count_joined() == order_.size) all_joined_ = Clock::now();
      if (order_.signal != 0 && !signalled_ && all_joined_ &&
          milliseconds_since(*all_joined_) >= order_.signal_after_ms) {
        signalled_ = true;
        if (pids_[static_cast<size_t>(order_.signalled_rank)] > 0)
          ::kill(pids_[static_cast<size_t>(order_.signalled_rank)], order_.signal);
      }
      if (milliseconds_since(start_) > order_.limit_ms || only_stopped_left()) kill_rest();
      ::usleep(1000);
    }
    return outcomes_;
  }

 private:
  static int64_t milliseconds_since(Clock::time_point start) {
    return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - start).count();
  }
  int count_joined() {
    char bytes[kMaxRanks];
    const ssize_t got = ::read(joined_[0], bytes, sizeof(bytes));
    if (got > 0) joined_ranks_ += static_cast<int>(got);
    return joined_ranks_;
  }
  void look_after(size_t rank) {
    if (pids_[rank] <= 0) return;
    int status = 0;
    if (::waitpid(pids_[rank], &status, WNOHANG | WUNTRACED | WCONTINUED) <= 0) return;
    if (WIFSTOPPED(status) || WIFCONTINUED(status)) {
      stopped_[rank] = WIFSTOPPED(status);
      return;
    }
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    outcomes_[rank] = {WIFEXITED(status) ? WEXITSTATUS(status) : -1, WIFSIGNALED(status) ? WTERMSIG(status) : 0,
                       seconds};
    pids_[rank] = 0;
    --running_;
  }
  bool only_stopped_left() const {
    for (size_t rank = 0; rank < pids_.size(); ++rank)
      if (pids_[rank] > 0 && !stopped_[rank]) return false;
    return true;
  }
  void kill_rest() {
    for (const pid_t pid : pids_)
      if (pid > 0) ::kill(pid, SIGKILL);
  }

  const Order& order_;
  const Clock::time_point start_;
  std::vector<pid_t> pids_;
  std::vector<bool> stopped_;
  std::vector<Outcome> outcomes_;
  int running_ = order_.size;
  int joined_[2] = {-1, -1};  // a pipe to which each rank writes a byte
  int joined_ranks_ = 0;
  std::optional<Clock::time_point> all_joined_;
  bool signalled_ = false;
};

[[noreturn]] void serve(int socket) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  Order order;
  while (transfer(socket, order, false)) {
    for (Outcome& outcome : Supervisor(order).run())
      if (!transfer(socket, outcome, true)) ::_exit(1);
  }
  ::_exit(0);
}

int free_port() {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  ::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address));
  ::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
  ::close(fd);
  return ntohs(address.sin_port);
}

std::string take_text(int fd) {
  std::string text(static_cast<size_t>(::lseek(fd, 0, SEEK_END)), '\0');
  const ssize_t got = ::pread(fd, text.data(), text.size(), 0);
  text.resize(got > 0 ? static_cast<size_t>(got) : 0);
  ::close(fd);
  return text;
}

}  // namespace

void start_process_helper() {
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) return;
  const pid_t pid = ::fork();
  if (pid == 0) {
    ::close(sockets[0]);
    serve(sockets[1]);
  }
  ::close(sockets[1]);
  helper().socket = sockets[0];
}

std::vector<ProcessResult> run_processes(int size, ProcessBody body, const ProcessOptions& options) {
  TRIREME_CHECK(size >= 1 && size <= kMaxRanks, size, " processes.");
  TRIREME_CHECK(helper().socket >= 0, "start_process_helper() was not called in main().");
  Order order{};
  order.body = body;
  order.size = size;
  order.port = free_port();
  order.signal = options.signal;
  order.signalled_rank = options.signalled_rank;
  order.comm_timeout_ms = options.comm_timeout.count();
  order.limit_ms = options.limit.count();
  order.signal_after_ms = options.signal_after.count();
  order.test_process = ::getpid();
  std::snprintf(order.argument, sizeof(order.argument), "%s", options.argument.c_str());
  for (int rank = 0; rank < size; ++rank) order.stderr_fds[rank] = ::memfd_create("stderr", MFD_CLOEXEC);
  TRIREME_CHECK(transfer(helper().socket, order, true), "the helper process has gone.");

  std::vector<ProcessResult> results;
  for (int rank = 0; rank < size; ++rank) {
    Outcome outcome{};
    TRIREME_CHECK(transfer(helper().socket, outcome, false), "the helper process has gone.");
    results.push_back({outcome.exit_code, outcome.signal, outcome.seconds, take_text(order.stderr_fds[rank])});
  }
  return results;
}

}  // namespace trireme
