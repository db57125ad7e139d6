#include "comm/meeting/meeting_point.h"

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "comm/first_line.h"
#include "trireme/base/error.h"
#include "trireme/base/launcher_channel.h"
#include "trireme/base/log.h"
#include "trireme/base/worker.h"

namespace trireme::comm {
namespace {

// Ranks that are told to stop must have read why before rank 0 takes the server away.
constexpr std::chrono::seconds kFarewell{10};

// So long a rank waits without a word: ranks that are started together come within seconds.
constexpr std::chrono::seconds kSilence{10};

/// While it lives: after kSilence it logs, once, what `text` then says. Stores wait in one call, hence the thread.
class LateNotice {
 public:
  explicit LateNotice(std::function<std::string()> text) {
    worker_.start_once([this, text = std::move(text)] {
      std::unique_lock lock(mutex_);
      if (!ended_.wait_for(lock, kSilence, [this] { return has_ended_; })) log(LogLevel::kWarning, text());
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

c10::intrusive_ptr<c10d::Store> open_store(const LaunchVariables& launch, std::chrono::milliseconds timeout) {
  if (launch.meeting == Meeting::kFile) {
    auto store = c10::make_intrusive<c10d::FileStore>(launch.path, launch.size);
    store->setTimeout(timeout);
    return store;
  }
  c10d::TCPStoreOptions options;
  options.port = launch.port;
  options.isServer = launch.rank == 0 && !launch.launcher_serves;
  options.numWorkers = static_cast<size_t>(launch.size);
  options.waitWorkers = false;
  options.timeout = timeout;
  options.multiTenant = true;  // torch.distributed in the same program may use the same address
  return c10::make_intrusive<c10d::TCPStore>(launch.host, options);
}

}  // namespace

MeetingPoint MeetingPoint::open(const LaunchVariables& launch, std::chrono::milliseconds timeout) {
  const bool file = launch.meeting == Meeting::kFile;
  MeetingPoint point({launch.rank, launch.size}, file ? launch.path : str(launch.host, ":", launch.port), timeout,
                     launch.advice);
  try {
    // Rank 0 serves, or torchrun's agent: until then the others cannot connect.
    const LateNotice notice([&point] { return point.text_of_wait(0); });
    point.enter(open_store(launch, timeout), str("trireme/", launch.attempt, "/"));
  } catch (const std::exception& error) {
    throw IoError(str("rank ", launch.rank, " cannot use ", point.where_, ", where the ranks are to meet: ",
                      first_line(error), ". If the address is taken, set another MASTER_PORT", launch.advice));
  }
  return point;
}

MeetingPoint MeetingPoint::in(c10::intrusive_ptr<c10d::Store> store, const Place& place,
                              std::chrono::milliseconds timeout) {
  MeetingPoint point(place, "the store of torch.distributed", timeout, ". Every rank must join");
  try {
    point.enter(store, "trireme/join/");
  } catch (const std::exception& error) {
    throw IoError(str("rank ", place.rank, " cannot use ", point.where_, ": ", first_line(error)));
  }
  return point;
}

void MeetingPoint::enter(const c10::intrusive_ptr<c10d::Store>& store, const std::string& prefix) {
  const int64_t time = store->add(str(prefix, "joined/", place_.rank), 1);
  store_ = c10::make_intrusive<c10d::PrefixStore>(str(prefix, time), store);
}

std::string MeetingPoint::text_of_wait(int peer) const {
  return str("rank ", place_.rank, " of ", place_.size, " has waited ", kSilence.count(), " s at ", where_,
             " for rank ", peer, ", and goes on waiting, ",
             std::chrono::duration_cast<std::chrono::seconds>(timeout_).count(), " s in all", advice_);
}

std::vector<std::string> MeetingPoint::exchange(const std::string& key, const std::string& text) {
  std::atomic<int> peer = place_.rank;
  const LateNotice notice([&] { return text_of_wait(peer); });
  try {
    store_->set(key + std::to_string(place_.rank), text);
    std::vector<std::string> all;
    for (peer = 0; peer < place_.size; ++peer) {
      const std::string name = key + std::to_string(peer);
      store_->wait({name}, timeout_);
      all.push_back(store_->get_to_str(name));
    }
    return all;
  } catch (const std::exception& error) {
    tell_launcher({ErrorCode::kTimeout, peer});
    throw CommError(ErrorCode::kTimeout, str("rank ", place_.rank, " waited at ", where_, " for rank ", peer, " of ",
                                             place_.size, ", which did not come: ", first_line(error), advice_));
  }
}

void MeetingPoint::farewell() noexcept {
  try {
    const auto end = std::chrono::steady_clock::now() + kFarewell;
    int64_t gone = store_->add("gone", 1);
    while (place_.rank == 0 && gone < place_.size && std::chrono::steady_clock::now() < end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
      gone = store_->add("gone", 0);
    }
  } catch (...) {
    // The error that brought us here is the one to report.
  }
}

}  // namespace trireme::comm
