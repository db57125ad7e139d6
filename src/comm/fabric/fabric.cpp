#include "comm/fabric/fabric.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>

#include "comm/group_state.h"
#include "trireme/base/format.h"
#include "trireme/base/log.h"
#include "trireme/base/wait_hook.h"

namespace trireme::comm {
namespace {

using Clock = std::chrono::steady_clock;

// A sleeper looks around this often even when nobody rings: the bound on how late a death is noticed.
constexpr std::chrono::milliseconds kSlice{20};
constexpr std::chrono::microseconds kSpin{100};
// With more ranks than cores, polling keeps the peer that is waited for from running.
constexpr std::chrono::microseconds kCrowdedSpin{2};

void futex_wait(std::atomic<uint32_t>& word, uint32_t expected, std::chrono::nanoseconds timeout) {
  const timespec limit{.tv_sec = static_cast<time_t>(timeout.count() / 1'000'000'000),
                       .tv_nsec = static_cast<long>(timeout.count() % 1'000'000'000)};
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, expected, &limit, nullptr, 0);
}

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

std::string format_seconds(double seconds) { return formatted("{:.1f} s", seconds); }

/// Lets peers see whom this rank sleeps for.
class WaitsFor {
 public:
  WaitsFor(std::atomic<int64_t>& word, int peer) : word_(word) { word_.store(peer + 1, std::memory_order_relaxed); }
  ~WaitsFor() { word_.store(0, std::memory_order_relaxed); }
  WaitsFor(const WaitsFor&) = delete;
  WaitsFor& operator=(const WaitsFor&) = delete;

 private:
  std::atomic<int64_t>& word_;
};

}  // namespace

Fabric::Fabric(std::shared_ptr<Segment> segment, const GroupInfo& info, LastSeen last_seen_in_parent)
    : segment_(std::move(segment)),
      info_(info),
      last_seen_in_parent_(std::move(last_seen_in_parent)),
      layout_(info.place.size),
      spin_(info.place.size <= ::get_nprocs() ? kSpin : kCrowdedSpin),
      watches_(static_cast<size_t>(info.place.size)) {
  TRIREME_CHECK(segment_->bytes() >= layout_.bytes(), segment_->bytes(), " bytes for a group that needs ",
                layout_.bytes());
  RankControl& self = own();
  self.start_time = start_time_of(::getpid());
  self.pid.store(::getpid(), std::memory_order_relaxed);
  self.state.store(RankState::kAlive, std::memory_order_release);
  notify();
}

void Fabric::ring() noexcept {
  GroupControl& shared = group();
  shared.bell.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(&shared.bell), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

void Fabric::leave() noexcept {
  RankState expected = RankState::kAlive;
  own().state.compare_exchange_strong(expected, RankState::kLeft, std::memory_order_acq_rel);
  ring();
}

void Fabric::abort(ErrorCode code, const std::string& cause) noexcept {
  RankControl& self = own();
  if (self.state.load(std::memory_order_acquire) != RankState::kAlive) return;
  self.cause_code = static_cast<int32_t>(code);
  std::snprintf(self.cause, kCauseBytes, "%s", cause.c_str());
  self.state.store(RankState::kAborted, std::memory_order_release);
  ring();
}

void Fabric::cancel() noexcept {
  cancelled_.store(true, std::memory_order_release);
  ring();
}

std::string Fabric::title(int rank) const {
  const int64_t pid = control(rank).pid.load(std::memory_order_relaxed);
  return info_.title(rank, pid == ::getpid() || pid == 0 ? "" : str("pid ", pid));
}

std::string Fabric::last_seen(int rank) const {
  const std::string here = last_seen_here(rank);
  return last_seen_in_parent_ ? str(here, "; ", last_seen_in_parent_(rank)) : here;
}

std::string Fabric::last_seen_here(int rank) const {
  const RankControl& peer = control(rank);
  if (peer.state.load(std::memory_order_acquire) == RankState::kAbsent) return info_.title(rank) + " has not joined";
  const int64_t started = peer.started.load(std::memory_order_acquire);
  const int64_t finished = peer.finished.load(std::memory_order_acquire);
  if (started == 0) return info_.title(rank) + " has not called a collective";
  const Call call = peer.calls[started % kCallRecords].read();
  return str(info_.title(rank), finished >= started ? " was last in " : " is in ", describe(call));
}

void Fabric::sleep_until(const std::function<bool()>& ready, const Wait& wait) {
  GroupControl& shared = group();
  const WaitsFor published(own().waits_for, wait.peer);
  std::optional<WaitScope> host;
  if (wait.patience == Patience::kCaller) host.emplace();
  const auto start = Clock::now();
  auto looked_at_processes = start;
  auto warns_at = start + info_.warn_after;
  while (true) {
    shared.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t bell = shared.bell.load(std::memory_order_seq_cst);
    if (!ready()) futex_wait(shared.bell, bell, std::min<std::chrono::nanoseconds>(kSlice, info_.timeout));
    shared.sleepers.fetch_sub(1, std::memory_order_relaxed);
    if (ready()) return;
    if (host) host->poll();

    const auto now = Clock::now();
    const bool due = now - looked_at_processes >= kSlice / 2;
    if (due) looked_at_processes = now;
    if (now >= warns_at)
      warns_at =
          warn_of_stopped(wait.what, seconds_since(start)) ? Clock::time_point::max() : now + kLookForStoppedEvery;
    const auto failure = find_failure(wait, due ? Look::kProcesses : Look::kFlags, seconds_since(start));
    // A peer may have written just the awaited value before it went.
    if (!failure) continue;
    if (ready()) return;
    std::rethrow_exception(failure->error());
  }
}

std::exception_ptr Fabric::Failure::error() const {
  if (code == ErrorCode::kState) return std::make_exception_ptr(StateError(text));
  if (peer < 0) return std::make_exception_ptr(CommError(code, text));
  return std::make_exception_ptr(PeerError(code, text, peer, cause));
}

bool Fabric::process_is_dead(int rank) {
  const RankControl& peer = control(rank);
  if (peer.pid.load(std::memory_order_relaxed) == ::getpid()) return false;  // ranks as threads die together
  std::lock_guard lock(watches_mutex_);
  ProcessWatch& watch = watches_[static_cast<size_t>(rank)];
  if (!watch.watching()) watch = ProcessWatch(peer.pid.load(std::memory_order_relaxed), peer.start_time);
  return watch.dead();
}

std::string Fabric::context_of(const std::function<std::string()>& what, double elapsed_s) const {
  return str("in ", what(), " of group '", info_.name, "' after ", format_seconds(elapsed_s));
}

std::unique_ptr<Fabric::Failure> Fabric::failure_of(int rank, const Wait& wait, Look look, double elapsed_s) {
  const auto lost = [&](const char* how, const std::string& advice) {
    const char* waited = rank == wait.peer ? " waited for it " : " waited ";
    const std::string text = str(title(rank), how, " while ", info_.title(info_.place.rank), waited,
                                 context_of(wait.what, elapsed_s), "; ", last_seen(rank), advice);
    return std::make_unique<Failure>(Failure{ErrorCode::kPeerLost, text, text, rank});
  };
  const RankControl& peer = control(rank);
  const RankState state = peer.state.load(std::memory_order_acquire);
  if (state == RankState::kAborted)
    return std::make_unique<Failure>(Failure{static_cast<ErrorCode>(peer.cause_code),
                                             str(title(rank), " failed while ", info_.title(info_.place.rank), " was ",
                                                 context_of(wait.what, elapsed_s), ": ", peer.cause),
                                             peer.cause, rank});
  if (state == RankState::kLeft && rank == wait.peer)
    return lost(" left", wait.call ? advice_on_method(*wait.call) : "");
  if (state == RankState::kAlive && look == Look::kProcesses && process_is_dead(rank) &&
      peer.state.load(std::memory_order_acquire) == RankState::kAlive)
    return lost(" died", "");
  return nullptr;
}

std::exception_ptr Fabric::lost_peer(bool with_processes, const std::function<std::string()>& what, double elapsed_s) {
  const Wait wait{.peer = -1, .patience = Patience::kBackground, .what = what};
  for (int rank = 0; rank < info_.place.size; ++rank) {
    if (rank == info_.place.rank) continue;
    const auto failure = failure_of(rank, wait, with_processes ? Look::kProcesses : Look::kFlags, elapsed_s);
    if (failure) return failure->error();
  }
  return nullptr;
}

std::unique_ptr<Fabric::Failure> Fabric::find_failure(const Wait& wait, Look look, double elapsed_s) {
  const Place& place = info_.place;
  if (cancelled_.load(std::memory_order_acquire)) {
    const std::string text = str("group '", info_.name, "' was destroyed while ", wait.what(), " was under way");
    return std::make_unique<Failure>(Failure{ErrorCode::kState, text, text});
  }
  // Another thread of this rank has ended the group.
  if (own().state.load(std::memory_order_acquire) == RankState::kAborted)
    return std::make_unique<Failure>(Failure{static_cast<ErrorCode>(own().cause_code), own().cause, own().cause});
  bool all_left = place.size > 1;
  for (int rank = 0; rank < place.size; ++rank) {
    if (rank == place.rank) continue;
    if (control(rank).state.load(std::memory_order_acquire) != RankState::kLeft) all_left = false;
    if (auto failure = failure_of(rank, wait, look, elapsed_s)) return failure;
  }
  if (all_left && wait.peer < 0) {
    const std::string text =
        str("every peer left while ", info_.title(place.rank), " waited ", context_of(wait.what, elapsed_s));
    return std::make_unique<Failure>(Failure{ErrorCode::kPeerLost, text, text});
  }
  if (elapsed_s * 1000 < static_cast<double>(info_.timeout.count())) return nullptr;
  return std::make_unique<Failure>(timed_out(wait, context_of(wait.what, elapsed_s)));
}

Fabric::Failure Fabric::timed_out(const Wait& wait, const std::string& context) const {
  const int self = info_.place.rank;
  const std::string advice =
      ". It may be stopped, stuck or slow, or not make this call, as all ranks must; the limit is the timeout given at "
      "init, or TRIREME_TIMEOUT_S.";
  if (wait.peer < 0) {
    const std::string text = str("no peer arrived while ", info_.title(self), " waited ", context, advice);
    return {ErrorCode::kTimeout, text, text};
  }
  const int late = culprit(wait.peer);
  const std::string whom = late == wait.peer ? "it" : str(title(wait.peer), ", which it keeps waiting,");
  const std::string text =
      str(title(late), is_stopped(control(late).pid) ? " is stopped and" : "", " did not arrive while ",
          info_.title(self), " waited for ", whom, " ", context, "; ", last_seen(late), advice);
  return {ErrorCode::kTimeout, text, text, late};
}

int Fabric::stopped_peer() const {
  for (int rank = 0; rank < info_.place.size; ++rank)
    if (rank != info_.place.rank && is_stopped(control(rank).pid.load(std::memory_order_relaxed))) return rank;
  return -1;
}

bool Fabric::warn_of_stopped(const std::function<std::string()>& what, double elapsed_s) const {
  const int stopped = stopped_peer();
  if (stopped < 0) return false;
  log(LogLevel::kWarning,
      str("comm: ", title(stopped), " is stopped, by SIGSTOP or a debugger, and ", info_.title(info_.place.rank),
          " waits ", context_of(what, elapsed_s), "; ", last_seen(stopped), ". `kill -CONT ",
          control(stopped).pid.load(std::memory_order_relaxed), "` lets it go on"));
  return true;
}

int Fabric::culprit(int peer) const {
  if (const int stopped = stopped_peer(); stopped >= 0) return stopped;
  int late = peer;
  for (int links = 0; links < info_.place.size; ++links) {
    const auto next = static_cast<int>(control(late).waits_for.load(std::memory_order_relaxed)) - 1;
    if (next < 0) return late;
    if (next == info_.place.rank) break;
    late = next;
  }
  return peer;  // a circle
}

}  // namespace trireme::comm
