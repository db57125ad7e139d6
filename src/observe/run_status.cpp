#include "trireme/observe/run_status.h"

#include <ATen/core/Tensor.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/worker.h"

namespace trireme {
namespace {

constexpr const char* kPrefix = "trireme-status";
constexpr double kWeightOfPastRate = 0.8;  // weight of the past in samples per second

// --- a rank as JSON --------------------------------------------------------------------------------------------------

Json json_of(const RankNow& now) {
  Json calls = Json::array();
  for (const CallNow& call : now.calls)
    calls.push_back({{"group", call.group},
                     {"ranks", call.ranks},
                     {"number", call.number},
                     {"text", call.text},
                     {"seconds", call.seconds}});
  return {{"pid", now.pid},
          {"rank", now.rank},
          {"ranks", now.ranks},
          {"job", now.job},
          {"folder", now.folder},
          {"step", now.step},
          {"samples", now.samples},
          {"loss", now.loss ? Json(*now.loss) : Json()},
          {"samples_per_s", now.samples_per_s},
          {"tokens_per_s", now.tokens_per_s},
          {"seconds_since_step", now.seconds_since_step},
          {"device_bytes", now.device_bytes},
          {"seconds_outside", now.seconds_outside ? Json(*now.seconds_outside) : Json()},
          {"record", now.record},
          {"calls", calls}};
}

RankNow rank_of(const Json& json) {
  RankNow now{.pid = json.at("pid").get<pid_t>(),
              .rank = json.at("rank").get<int>(),
              .ranks = json.at("ranks").get<int>(),
              .job = json.at("job").get<std::string>(),
              .folder = json.at("folder").get<std::string>(),
              .step = json.at("step").get<int64_t>(),
              .samples = json.at("samples").get<int64_t>(),
              .samples_per_s = json.at("samples_per_s").get<double>(),
              .tokens_per_s = json.at("tokens_per_s").get<double>(),
              .seconds_since_step = json.at("seconds_since_step").get<double>(),
              .device_bytes = json.at("device_bytes").get<int64_t>()};
  if (json.at("loss").is_number()) now.loss = json["loss"].get<double>();
  // Not told by a process of an older version.
  if (const auto found = json.find("seconds_outside"); found != json.end() && found->is_number())
    now.seconds_outside = found->get<double>();
  now.record = json.value("record", "");
  for (const Json& call : json.at("calls"))
    now.calls.push_back({.group = call.at("group").get<std::string>(),
                         .ranks = call.at("ranks").get<std::vector<int>>(),
                         .number = call.at("number").get<int64_t>(),
                         .text = call.at("text").get<std::string>(),
                         .seconds = call.at("seconds").get<double>()});
  return now;
}

// --- sockets ---------------------------------------------------------------------------------------------------------

/// Closed at its end.
class Socket {
 public:
  explicit Socket(int file = -1) : file_(file) {}
  Socket(Socket&& other) noexcept : file_(std::exchange(other.file_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(file_, other.file_);
    return *this;
  }
  ~Socket() {
    if (file_ >= 0) ::close(file_);
  }
  int file() const { return file_; }
  bool is_open() const { return file_ >= 0; }

 private:
  int file_;
};

struct Address {
  sockaddr_un address{};
  socklen_t bytes = 0;
};

/// An address of the abstract namespace: it begins with a zero, and nothing stands for it in the file system.
Address address_of(const std::string& name) {
  Address made;
  made.address.sun_family = AF_UNIX;
  const size_t length = std::min(name.size(), sizeof made.address.sun_path - 1);
  std::memcpy(made.address.sun_path + 1, name.data(), length);
  made.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
  return made;
}

const sockaddr* pointer(const Address& address) { return reinterpret_cast<const sockaddr*>(&address.address); }

/// Whether the process at the other end is this user's, or root's.
bool is_trusted(const Socket& socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  if (::getsockopt(socket.file(), SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return false;
  return peer.uid == ::geteuid() || peer.uid == 0;
}

struct Name {
  pid_t pid = 0;
  int rank = 0;
  int ranks = 1;
  std::string job;

  std::string text() const { return str(kPrefix, "/", pid, "/", rank, "/", ranks, "/", job); }
  static std::optional<Name> parse(const std::string& text) {
    std::istringstream words(text);
    std::string prefix, pid, rank, ranks, job;
    std::getline(words, prefix, '/');
    std::getline(words, pid, '/');
    std::getline(words, rank, '/');
    std::getline(words, ranks, '/');
    std::getline(words, job);
    if (prefix != kPrefix || job.empty()) return std::nullopt;
    return Name{
        .pid = std::atoi(pid.c_str()), .rank = std::atoi(rank.c_str()), .ranks = std::atoi(ranks.c_str()), .job = job};
  }
};

// --- who is asked ----------------------------------------------------------------------------------------------------

/// Answers with what all of this process's ranks are at.
class Server {
 public:
  /// For ever: it may be asked while the process ends.
  static Server& of_process() {
    static auto* const made = new Server;
    return *made;
  }

  int64_t add(const Name& name, std::function<RankNow()> now) {
    const std::lock_guard lock(mutex_);
    const int64_t number = next_++;
    told_[number] = std::move(now);
    start(name);
    return number;
  }
  void remove(int64_t number) {
    const std::lock_guard lock(mutex_);
    told_.erase(number);
  }

 private:
  // A machine where no socket can be made trains all the same: nobody can ask.
  void start(const Name& name) {
    if (process_ == ::getpid()) return;
    process_ = ::getpid();  // also of a fork, which has no thread
    Socket socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const Address address = address_of(name.text());
    constexpr int kWaiting = 16;
    if (!socket.is_open() || ::bind(socket.file(), pointer(address), address.bytes) != 0 ||
        ::listen(socket.file(), kWaiting) != 0)
      return;
    socket_ = std::move(socket);
    (new Worker)->start_once([this] { serve(); });  // for ever, as this
  }

  void serve() {
    while (true) {
      const Socket asked(::accept4(socket_.file(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!asked.is_open()) {
        if (errno == EINTR || errno == ECONNABORTED) continue;
        return;
      }
      if (is_trusted(asked)) answer(asked);
    }
  }

  void answer(const Socket& asked) {
    Json ranks = Json::array();
    {
      const std::lock_guard lock(mutex_);
      for (const auto& [number, now] : told_) ranks.push_back(json_of(now()));
    }
    const std::string text = ranks.dump(-1, ' ', false, Json::error_handler_t::replace);
    constexpr timeval kPatience{.tv_sec = 1, .tv_usec = 0};
    ::setsockopt(asked.file(), SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof kPatience);
    for (size_t sent = 0; sent < text.size();) {
      const ssize_t bytes = ::send(asked.file(), text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (bytes <= 0) return;
      sent += static_cast<size_t>(bytes);
    }
  }

  std::mutex mutex_;
  // Guarded by mutex_:
  pid_t process_ = 0;
  int64_t next_ = 0;
  std::map<int64_t, std::function<RankNow()>> told_;
  Socket socket_;  // of the thread, once it runs
};

// --- who asks --------------------------------------------------------------------------------------------------------

std::vector<Name> names_of_machine() {
  std::vector<Name> names;
  std::ifstream sockets("/proc/net/unix");
  constexpr const char* kListening = "00010000";  // flags of a socket that listens
  for (std::string line; std::getline(sockets, line);) {
    const size_t at = line.find(str("@", kPrefix, "/"));
    if (at == std::string::npos || line.find(kListening) == std::string::npos) continue;
    if (auto name = Name::parse(line.substr(at + 1))) names.push_back(std::move(*name));
  }
  std::ranges::sort(names, [](const Name& a, const Name& b) {
    return std::tie(a.job, a.rank, a.pid) < std::tie(b.job, b.rank, b.pid);
  });
  return names;
}

/// The state and the resident bytes; nothing where there is no such process.
std::optional<std::pair<char, int64_t>> state_of(pid_t pid) {
  std::ifstream file(str("/proc/", pid, "/stat"));
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  const size_t behind_name = text.rfind(')');  // a name may hold anything
  if (behind_name == std::string::npos) return std::nullopt;
  std::istringstream words(text.substr(behind_name + 1));
  char state = '?';
  words >> state;
  constexpr int kBetweenStateAndPages = 20;
  std::string word;
  for (int i = 0; i < kBetweenStateAndPages; ++i) words >> word;
  int64_t pages = 0;
  words >> pages;
  return std::pair(state, pages * ::sysconf(_SC_PAGESIZE));
}

struct Asked {
  Socket socket;
  std::string answer;
  bool is_over = false;
};

Asked ask(const Name& name) {
  Asked asked{.socket = Socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)), .answer = {}};
  const Address address = address_of(name.text());
  asked.is_over = !asked.socket.is_open() || ::connect(asked.socket.file(), pointer(address), address.bytes) != 0 ||
                  !is_trusted(asked.socket);
  return asked;
}

void take(Asked& asked) {
  char buffer[1 << 14];
  const ssize_t bytes = ::recv(asked.socket.file(), buffer, sizeof buffer, 0);
  if (bytes > 0) asked.answer.append(buffer, static_cast<size_t>(bytes));
  if (bytes == 0 || (bytes < 0 && errno != EAGAIN && errno != EINTR)) asked.is_over = true;
}

void await(std::vector<Asked>& all, std::chrono::milliseconds patience) {
  const auto until = std::chrono::steady_clock::now() + patience;
  while (true) {
    std::vector<pollfd> files;
    std::vector<Asked*> open;
    for (Asked& asked : all)
      if (!asked.is_over) {
        files.push_back({.fd = asked.socket.file(), .events = POLLIN, .revents = 0});
        open.push_back(&asked);
      }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (files.empty() || left.count() <= 0) return;
    if (::poll(files.data(), files.size(), static_cast<int>(left.count())) <= 0) return;
    for (size_t i = 0; i < files.size(); ++i)
      if (files[i].revents != 0) take(*open[i]);
  }
}

}  // namespace

void StepCounts::note_loss(const at::Tensor& loss) {
  // A device would have to be waited for.
  if (!loss.defined() || !loss.is_cpu() || loss.numel() != 1) return;
  double value = 0;
  switch (loss.scalar_type()) {
    case at::kFloat:
      value = *loss.const_data_ptr<float>();
      break;
    case at::kDouble:
      value = *loss.const_data_ptr<double>();
      break;
    case at::kBFloat16:
      value = *loss.const_data_ptr<at::BFloat16>();
      break;
    default:
      return;
  }
  const std::lock_guard lock(mutex_);
  loss_ = value;
}

int64_t StepCounts::samples() const {
  const std::lock_guard lock(mutex_);
  return samples_;
}

void StepCounts::note_window(int64_t step, int64_t samples) {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  const double seconds = std::chrono::duration<double>(now - last_).count();
  if (has_window_ && seconds > 0) {
    const double rate = static_cast<double>(samples - samples_) / seconds;
    samples_per_s_ = samples_per_s_ > 0 ? kWeightOfPastRate * samples_per_s_ + (1 - kWeightOfPastRate) * rate : rate;
  }
  has_window_ = true;
  last_ = now;
  step_ = step;
  samples_ = samples;
}

void StepCounts::write_to(RankNow& now) const {
  const std::lock_guard lock(mutex_);
  now.step = step_;
  now.samples = samples_;
  now.loss = loss_;
  now.samples_per_s = samples_per_s_;
  now.tokens_per_s = samples_per_s_ * static_cast<double>(tokens_per_sample_.load());
  now.seconds_since_step = std::chrono::duration<double>(Clock::now() - last_).count();
}

ToldStatus::ToldStatus(int rank, int ranks, const std::string& job, std::function<RankNow()> now)
    : number_(Server::of_process().add({.pid = ::getpid(), .rank = rank, .ranks = ranks, .job = job}, std::move(now))) {
}

ToldStatus::~ToldStatus() { Server::of_process().remove(number_); }

std::string job_of_this_process(int ranks) {
  const auto address = environment("MASTER_ADDR");
  const auto port = environment("MASTER_PORT");
  if (address && port) return str(*address, ":", *port);
  // Ranks that a launcher without these variables has started have one parent.
  return ranks > 1 ? str("children of ", ::getppid()) : str("process ", ::getpid());
}

std::vector<ProcessNow> processes_now(std::chrono::milliseconds patience) {
  const std::vector<Name> names = names_of_machine();
  std::vector<Asked> asked;
  for (const Name& name : names) asked.push_back(ask(name));
  await(asked, patience);
  std::vector<ProcessNow> processes;
  for (size_t i = 0; i < names.size(); ++i) {
    const auto state = state_of(names[i].pid);
    if (!state) continue;
    ProcessNow process{.pid = names[i].pid,
                       .state = state->first,
                       .rank = names[i].rank,
                       .ranks = names[i].ranks,
                       .job = names[i].job,
                       .resident_bytes = state->second};
    const Json answer = Json::parse(asked[i].answer, nullptr, /*allow_exceptions=*/false);
    if (answer.is_array())
      for (const Json& rank : answer) process.now.push_back(rank_of(rank));
    if (answer.is_array() && answer.empty()) continue;  // its training is over
    processes.push_back(std::move(process));
  }
  return processes;
}

}  // namespace trireme
