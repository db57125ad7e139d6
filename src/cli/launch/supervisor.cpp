#include "cli/launch/supervisor.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"
#include "trireme/base/words.h"

namespace trireme::cli {

using std::chrono::milliseconds;

namespace {

Fd log_of(const std::string& folder, size_t rank) {
  if (folder.empty()) return Fd();
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  const auto path = std::filesystem::path(folder) / str("rank-", rank, ".log");
  Fd log(open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (!log.is_open())
    throw ConfigError(str("--log-dir ", folder, ": ", path.string(), " cannot be written: ", std::strerror(errno),
                          "; give a folder that may be written to"));
  return log;
}

// A rank that does not handle the signal would be ended by it, and nobody asked for that.
std::string text_of_left_out(const std::string& name, const std::vector<std::string>& ranks) {
  if (ranks.empty()) return "";
  return str(name, ": SIGUSR1 is not passed to ", ranks.size() == 1 ? "rank " : "ranks ", joined(ranks),
             ranks.size() == 1 ? ", which does" : ", which do", " not handle it and would be ended by it\n");
}

}  // namespace

Supervisor::Supervisor(std::vector<RankCommand> commands, const SupervisorOptions& options)
    : commands_(std::move(commands)), options_(options) {}

Verdict Supervisor::run() {
  try {
    start();
  } catch (...) {
    signal_all(SIGKILL);
    while (any_running()) poll_once();
    throw;
  }
  while (any_running()) poll_once();
  std::vector<RankEnd> ends;
  for (const auto& rank : ranks_) ends.push_back(rank->end);
  auto verdict = judge(ends, options_.name, first_signal_);
  if (lost_output_ != 0) {
    if (verdict.exit_code == kDone) verdict.exit_code = kFailed;
    verdict.report = str(options_.name, ": ", lost_output(lost_output_), "\n", verdict.report);
  }
  if (!verdict.report.empty() && last_byte_[1] != '\n') relay(options_.err, "\n");
  relay(options_.err, verdict.report);
  return verdict;
}

void Supervisor::start() {
  for (size_t i = 0; i < commands_.size(); ++i) {
    const bool plain = options_.prefix == Prefix::kNone || (options_.prefix == Prefix::kAllButFirst && i == 0);
    const std::string prefix = plain ? "" : str("[rank ", i, "] ");
    const OutputTail tail(options_.tail_lines);
    Fd log = log_of(options_.log_dir, i);  // before the rank starts: it may be refused
    ranks_.push_back(
        std::make_unique<RunningRank>(RunningRank{RankProcess::start(commands_[i]),
                                                  std::move(log),
                                                  {nullptr, options_.out, LineRelay(prefix), tail, nullptr},
                                                  {nullptr, options_.err, LineRelay(prefix), tail, nullptr},
                                                  {}}));
    auto& rank = *ranks_.back();
    rank.out.log = rank.err.log = &rank.log;
    rank.out.from = &rank.process.out();
    rank.err.from = &rank.process.err();
    rank.end.rank = static_cast<int>(i);
    guard_.watch(rank.process.pid());
  }
}

void Supervisor::poll_once() {
  std::vector<pollfd> waits{{signals_.fd(), POLLIN, 0}};
  std::vector<Stream*> streams{nullptr};
  for (const auto& rank : ranks_) {
    for (Stream* stream : {&rank->err, &rank->out}) {
      if (!stream->from->is_open()) continue;
      waits.push_back({stream->from->get(), POLLIN, 0});
      streams.push_back(stream);
    }
    if (!rank->has_ended && rank->process.ended().is_open()) {
      waits.push_back({rank->process.ended().get(), POLLIN, 0});
      streams.push_back(nullptr);
    }
  }
  poll(waits.data(), waits.size(), milliseconds_to_wait());
  for (size_t i = 1; i < waits.size(); ++i) {
    if (streams[i] && waits[i].revents != 0) read_stream(*streams[i]);
  }
  while (const int number = signals_.next()) on_signal(number);
  reap_ended();
  if (deadline_ && Clock::now() >= *deadline_) on_deadline();
}

int Supervisor::milliseconds_to_wait() const {
  const bool woken_by_ends =
      std::all_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->process.ended().is_open(); });
  milliseconds wait = woken_by_ends ? milliseconds(60'000) : milliseconds(100);
  if (deadline_) wait = std::min(wait, std::chrono::ceil<milliseconds>(*deadline_ - Clock::now()));
  return static_cast<int>(std::max(wait, milliseconds(0)).count());
}

// Takes what is there, at most one buffer, so that a rank that writes without end does not starve the others. Returns
// how much it was.
size_t Supervisor::read_stream(Stream& stream) {
  char buffer[64 * 1024];
  const auto bytes = read(stream.from->get(), buffer, sizeof(buffer));
  if (bytes < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (bytes <= 0) {
    stream.from->reset();
    relay(stream.to, stream.relay.finish());
    stream.tail.finish();
    return 0;
  }
  const std::string_view text(buffer, static_cast<size_t>(bytes));
  keep(*stream.log, text);
  stream.tail.feed(text);
  relay(stream.to, stream.relay.feed(text));
  return text.size();
}

// The rest of an ended rank's output. Does not wait for the pipe's end: a process that left the group may hold it open,
// and write into it for ever. What the rank itself has left fits into the pipe, and so into the limit.
void Supervisor::drain(Stream& stream) {
  constexpr size_t kMostBytes = size_t{1} << 20;
  for (size_t bytes = 0; stream.from->is_open() && bytes < kMostBytes;) {
    pollfd wait{stream.from->get(), POLLIN, 0};
    if (poll(&wait, 1, 0) <= 0) break;
    bytes += read_stream(stream);
  }
  stream.from->reset();
  relay(stream.to, stream.relay.finish());
  stream.tail.finish();
}

void Supervisor::relay(int fd, const std::string& text) {
  if (text.empty()) return;
  char& last = last_byte_[fd == options_.err ? 1 : 0];
  const bool begins_a_line = text.starts_with("[rank ") || text.starts_with(options_.name);
  const std::string piece = begins_a_line && last != '\n' ? "\n" + text : text;
  last = text.back();
  const int error = write_all(fd, piece);
  // The ranks go on. That nobody reads any more (`| head`) is the reader's choice.
  if (error != 0 && error != EPIPE && fd == options_.out && lost_output_ == 0) lost_output_ = error;
}

// A log that cannot be written ends, which is said once; the job goes on.
void Supervisor::keep(Fd& log, std::string_view text) {
  const int error = log.is_open() ? write_all(log.get(), text) : 0;
  if (error == 0) return;
  log.reset();
  relay(options_.err, str(options_.name, ": --log-dir ", options_.log_dir, ": ", std::strerror(error),
                          "; the log of a rank ends here\n"));
}

void Supervisor::reap_ended() {
  const bool ending = phase_ == Phase::kTerminating || phase_ == Phase::kKilling;
  for (const auto& rank : ranks_) {
    if (rank->has_ended) continue;
    const pid_t group = rank->process.pid();
    const auto status = rank->process.reap();
    if (!status) continue;
    guard_.forget(group);
    rank->has_ended = true;
    rank->end.wait_status = *status;
    rank->end.order = ended_++;
    rank->end.ended_by_launcher = ending;
    drain(rank->err);
    drain(rank->out);
    rank->end.tail = rank->err.tail.lines();
    if (rank->end.tail.empty()) rank->end.tail = rank->out.tail.lines();
    auto told = rank->process.told();
    rank->end.peer_failure = told.failure;
    rank->end.refusal = std::move(told.refusal);
    keep(rank->log, rank->end.refusal);
    on_end(*rank);
  }
}

void Supervisor::on_end(RunningRank& rank) {
  if (rank.end.wait_status == 0 && signals_seen_ == 0) return;
  if (phase_ == Phase::kRunning) {
    if (signals_seen_ > 0) return enter(Phase::kSettling, options_.grace);
    const auto& told = rank.end.peer_failure;
    const bool may_explain = told && static_cast<size_t>(told->peer) < ranks_.size() && !ranks_[told->peer]->has_ended;
    return may_explain ? enter(Phase::kSettling, options_.settle) : terminate();
  }
  // The rank that was blamed has told its own story by now; after a forwarded signal, the others finish theirs.
  if (phase_ == Phase::kSettling && signals_seen_ == 0 && !rank.end.peer_failure) terminate();
}

void Supervisor::on_signal(int number) {
  if (number == SIGUSR1) {
    std::vector<std::string> left_out;
    for (const auto& rank : ranks_)
      if (!rank->has_ended && !rank->process.signal_if_handled(number))
        left_out.push_back(std::to_string(rank->end.rank));
    return relay(options_.err, text_of_left_out(options_.name, left_out));
  }
  if (phase_ == Phase::kTerminating || phase_ == Phase::kKilling || signals_seen_ >= 2) {
    signal_all(SIGKILL);
    return enter(Phase::kKilling, options_.grace);
  }
  if (signals_seen_++ == 0) first_signal_ = number;
  signal_all(number);
  signal_all(SIGCONT);
  if (signals_seen_ == 2) enter(Phase::kSettling, options_.grace);
}

void Supervisor::on_deadline() {
  if (phase_ == Phase::kSettling) return terminate();
  signal_all(SIGKILL);
  enter(Phase::kKilling, options_.grace);
}

void Supervisor::enter(Phase phase, milliseconds time_left) {
  phase_ = phase;
  deadline_ = Clock::now() + time_left;
}

void Supervisor::terminate() {
  for (const auto& rank : ranks_) rank->end.was_stopped = !rank->has_ended && rank->process.is_stopped();
  signal_all(SIGTERM);
  signal_all(SIGCONT);  // a stopped rank would not see the other
  enter(Phase::kTerminating, options_.grace);
}

void Supervisor::signal_all(int number) {
  for (const auto& rank : ranks_) rank->process.signal(number);
}

bool Supervisor::any_running() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return !rank->has_ended; });
}

}  // namespace trireme::cli
