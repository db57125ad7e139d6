#include "comm/meeting/meeting_point.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "comm/first_line.h"
#include "comm/meeting/meeting_address.h"
#include "comm/meeting/meeting_file.h"
#include "trireme/base/error.h"
#include "trireme/base/launcher_channel.h"
#include "trireme/base/log.h"
#include "trireme/base/random_text.h"
#include "trireme/base/worker.h"

namespace trireme::comm {
namespace {

using Clock = std::chrono::steady_clock;

// Ranks that are told to stop must have read why before rank 0 takes the server away.
constexpr std::chrono::seconds kFarewell{10};

// So long a rank waits without a word: ranks that are started together come within seconds.
constexpr std::chrono::seconds kSilence{10};

/// While it lives: after `silence` it logs, once, what `text` then says. Stores and resolvers wait in one call, hence
/// the thread.
class LateNotice {
 public:
  explicit LateNotice(std::function<std::string()> text, std::chrono::milliseconds silence = kSilence) {
    worker_.start_once([this, silence, text = std::move(text)] {
      std::unique_lock lock(mutex_);
      if (!ended_.wait_for(lock, silence, [this] { return has_ended_; })) log(LogLevel::kWarning, text());
    });
  }
  ~LateNotice() {
    {
      const std::lock_guard lock(mutex_);
      has_ended_ = true;
    }
    ended_.notify_all();
  }
  LateNotice(const LateNotice&) = delete;
  LateNotice& operator=(const LateNotice&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  bool has_ended_ = false;  // guarded by mutex_
  Worker worker_;           // the last member: it uses the others, and is joined first
};

/// The addresses where the ranks look for the server; says so when MASTER_ADDR is long in becoming known.
std::vector<HostAddress> addresses_to_meet_at(const LaunchVariables& launch, const WaitLimits& limits) {
  const auto limit = std::min(limits.resolve, limits.timeout);
  const LateNotice notice(
      [&] {
        return str("rank ", launch.rank, " of ", launch.size, " looks for the name ", launch.host,
                   " (MASTER_ADDR), which is not known yet, and goes on looking, ",
                   std::chrono::duration<double>(limit).count(), " s in all (TRIREME_RESOLVE_TIMEOUT_S)");
      },
      std::min<std::chrono::milliseconds>(kSilence, limit / 2));
  const auto named = resolve_within(launch.host, limit);
  const std::string host = launch.meeting_host();
  return host == launch.host ? named : resolve(host).addresses;
}

/// Ports are no secret: that of a job of Slurm follows from the job's number.
void check_server(const std::vector<HostAddress>& addresses, uint16_t port) {
  for (const HostAddress& address : addresses)
    if (address.is_loopback()) check_listener(address, port, ::geteuid());
}

c10::intrusive_ptr<c10d::Store> open_server(const LaunchVariables& launch, const std::vector<HostAddress>& addresses,
                                            std::chrono::milliseconds timeout) {
  const std::string host = launch.meeting_host();
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.isServer = launch.serves();
  options.numWorkers = static_cast<size_t>(launch.size);
  options.waitWorkers = false;
  options.timeout = timeout;
  options.multiTenant = true;  // torch.distributed in the same program may use the same address
  // By itself the store would listen on all addresses. Where the port is taken it is left to try: either this process
  // has a server there already, which it finds, or it fails and says why.
  if (options.isServer) options.masterListenFd = listen_on(places_to_listen(host, addresses), launch.port);
  const bool here = says_loopback(host) && !launch.launcher_serves;
  if (here) check_server(addresses, launch.port);  // before a word is said to it, and when it is there for sure
  auto store = c10::make_intrusive<c10d::TCPStore>(host, options);
  if (here) check_server(addresses, launch.port);
  return store;
}

/// Between two looks at a store: longer and longer, since many ranks may look.
class Pause {
 public:
  explicit Pause(Clock::time_point end) : end_(end) {}

  /// Throws std::runtime_error: the end has come.
  void operator()() {
    if (Clock::now() >= end_) throw std::runtime_error("the time is over");
    std::this_thread::sleep_for(std::min<Clock::duration>(length_, end_ - Clock::now()));
    length_ = std::min(2 * length_, kLongest);
  }
  std::chrono::milliseconds left() const {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end_ - Clock::now());
    return std::max(left, std::chrono::milliseconds(1));  // none would be for ever
  }

 private:
  static constexpr std::chrono::milliseconds kLongest{64};
  const Clock::time_point end_;
  std::chrono::milliseconds length_{1};
};

c10::intrusive_ptr<c10d::Store> open_file(const LaunchVariables& launch, std::chrono::milliseconds timeout) {
  prepare_meeting_file(launch.path);
  auto store = c10::make_intrusive<c10d::FileStore>(launch.path, launch.size);
  store->setTimeout(timeout);
  return store;
}

}  // namespace

MeetingPoint MeetingPoint::open(const LaunchVariables& launch, const WaitLimits& limits) {
  const bool file = launch.meeting == Meeting::kFile;
  const std::string where = file ? launch.path : str(launch.meeting_host(), ":", launch.port);
  MeetingPoint point({launch.rank, launch.size}, where, {limits.timeout, launch.token}, launch.advice);
  const std::string cannot = str("rank ", launch.rank, " cannot use ", where, ", where the ranks are to meet: ");
  try {
    const auto addresses = file ? std::vector<HostAddress>() : addresses_to_meet_at(launch, limits);
    {
      // Rank 0 serves, or torchrun's agent: until then the others cannot connect.
      const LateNotice notice([&point] { return point.text_of_wait(0); });
      point.store_ = file ? open_file(launch, limits.timeout) : open_server(launch, addresses, limits.timeout);
    }
    point.enter(str("trireme/", launch.attempt, "/"));
  } catch (const CommError&) {
    throw;
  } catch (const ConfigError&) {
    throw;
  } catch (const Error& error) {
    throw IoError(str(cannot, error.what(), launch.advice));
  } catch (const std::exception& error) {
    throw IoError(str(cannot, first_line(error), ". If the address is taken, set another MASTER_PORT", launch.advice));
  }
  return point;
}

MeetingPoint MeetingPoint::in(c10::intrusive_ptr<c10d::Store> store, const Place& place, const Terms& terms) {
  MeetingPoint point(place, "the store of torch.distributed", terms, ". Every rank must join");
  point.store_ = std::move(store);
  try {
    point.enter("trireme/join/");
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw IoError(str("rank ", place.rank, " cannot use ", point.where_, ": ", first_line(error)));
  }
  return point;
}

// Under a key of a rank there may be what an earlier program of the same job has left, or what a stranger has written.
// So every rank but the first asks by a number that it has just drawn, and believes the answer to that number alone:
// the name of this meeting, which rank 0 has just drawn. All later keys begin with it.
void MeetingPoint::enter(const std::string& path) {
  path_ = path + seal_.prefix();
  std::atomic<int> peer = 0;
  const LateNotice notice([&] { return text_of_wait(peer); });
  const auto end = Clock::now() + terms_.timeout;
  std::string meeting;
  try {
    if (place_.rank == 0) {
      meeting = random_text();
      answer(meeting, peer, end);
    } else {
      meeting = ask(end);
    }
  } catch (const std::exception& error) {
    refuse_to_wait_for(peer, error);
  }
  path_ += meeting + "/";
}

std::string MeetingPoint::ask(Clock::time_point end) {
  const std::string question = random_text();
  const std::string own_key = str("asks/", place_.rank);
  for (Pause pause(end);; pause()) {
    if (look(own_key) != question) write(own_key, question);
    if (const auto meeting = look("answers/" + question)) {
      write(str(*meeting, "/came/", place_.rank), "");
      return *meeting;
    }
  }
}

void MeetingPoint::answer(const std::string& meeting, std::atomic<int>& peer, Clock::time_point end) {
  std::vector<std::string> answered(static_cast<size_t>(place_.size));
  peer = 1;
  for (Pause pause(end); peer < place_.size; pause()) {
    // Whoever is late, the others are answered.
    for (int rank = peer; rank < place_.size; ++rank) {
      const auto question = look(str("asks/", rank));
      if (!question || *question == answered[static_cast<size_t>(rank)]) continue;
      answered[static_cast<size_t>(rank)] = *question;
      write("answers/" + *question, meeting);
    }
    while (peer < place_.size && look(str(meeting, "/came/", peer.load()))) ++peer;
  }
}

void MeetingPoint::write(const std::string& key, const std::string& text) {
  const std::string name = path_ + key;
  store_->set(name, seal_.close(name, text));
}

std::optional<std::string> MeetingPoint::look(const std::string& key) {
  const std::string name = path_ + key;
  if (!store_->check({name})) return std::nullopt;
  return seal_.open(name, store_->get_to_str(name));
}

std::string MeetingPoint::read(const std::string& key, Clock::time_point end) {
  for (Pause pause(end);; pause()) {
    // A store that waits by itself answers sooner than one that is asked again and again.
    store_->wait({path_ + key}, pause.left());
    if (auto text = look(key)) return *std::move(text);
  }
}

std::string MeetingPoint::text_of_wait(int peer) const {
  return str("rank ", place_.rank, " of ", place_.size, " has waited ", kSilence.count(), " s at ", where_,
             " for rank ", peer, ", and goes on waiting, ",
             std::chrono::duration_cast<std::chrono::seconds>(terms_.timeout).count(), " s in all", advice_);
}

void MeetingPoint::refuse_to_wait_for(int peer, const std::exception& error) const {
  tell_launcher({ErrorCode::kTimeout, peer});
  const char* token = seal_.has_token() ? " with this rank's TRIREME_TOKEN, which must be the same on every rank" : "";
  throw CommError(ErrorCode::kTimeout,
                  str("rank ", place_.rank, " waited at ", where_, " for rank ", peer, " of ", place_.size,
                      ", which did not come", token, ": ", first_line(error), advice_));
}

std::vector<std::string> MeetingPoint::exchange(const std::string& key, const std::string& text) {
  std::atomic<int> peer = place_.rank;
  const LateNotice notice([&] { return text_of_wait(peer); });
  const auto end = Clock::now() + terms_.timeout;
  try {
    write(key + std::to_string(place_.rank), text);
    std::vector<std::string> all;
    for (peer = 0; peer < place_.size; ++peer) all.push_back(read(key + std::to_string(peer), end));
    return all;
  } catch (const std::exception& error) {
    refuse_to_wait_for(peer, error);
  }
}

void MeetingPoint::farewell() noexcept {
  try {
    write(str("gone/", place_.rank), "");
    const auto end = Clock::now() + kFarewell;
    for (int rank = 1; place_.rank == 0 && rank < place_.size; ++rank) (void)read(str("gone/", rank), end);
  } catch (...) {
    // The error that brought us here is the one to report.
  }
}

}  // namespace trireme::comm
