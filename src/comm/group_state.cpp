#include "comm/group_state.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <vector>

#include "trireme/base/launcher_channel.h"
#include "trireme/base/log.h"

namespace trireme::comm {

namespace {

/// The groups of this process, for who asks what their calls are.
struct LivingGroups {
  std::mutex mutex;
  std::vector<const GroupState*> all;  // guarded by mutex
};

// For ever: a group may end with the process.
LivingGroups& living_groups() {
  static auto* const made = new LivingGroups;
  return *made;
}

}  // namespace

GroupState::GroupState(GroupInfo info) : info_(std::move(info)), recorder_(info_) {
  LivingGroups& living = living_groups();
  const std::lock_guard lock(living.mutex);
  living.all.push_back(this);
}

GroupState::~GroupState() {
  if (is_forked()) return;  // the lock may be held by a thread that is not there
  LivingGroups& living = living_groups();
  const std::lock_guard lock(living.mutex);
  std::erase(living.all, this);
}

void GroupState::fail(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const PeerError& failure) {
    if (record_failure(failure, failure.cause())) tell_launcher({failure.code(), info_.world_rank(failure.peer())});
  } catch (const CommError& failure) {
    record_failure(failure, failure.what());
  } catch (const StateError&) {
    // As the declaration says.
  } catch (const std::exception& interruption) {  // of the host: a WaitHook threw
    abort(interruption.what());
  }
}

void GroupState::abort(const std::string& reason) noexcept {
  const std::string message = str(own_title(), " gave up group '", name(), "': ", reason);
  record_failure(CommError(ErrorCode::kPeerLost, message), message);
}

void GroupState::poll(const WaitScope& host) {
  try {
    host.poll();
  } catch (...) {
    fail(std::current_exception());
    throw;
  }
}

std::exception_ptr GroupState::destroyed_before(const Call& call) const {
  return std::make_exception_ptr(
      StateError(str("group '", name(), "' was destroyed before ", describe(call), " was complete")));
}

bool GroupState::record_failure(const CommError& error, const std::string& cause) noexcept {
  if (is_forked() || !remember_failure(error)) return false;
  tell_peers(error.code(), cause);
  log(LogLevel::kDebug,
      str(error.what(), "\nlast operations of ", own_title(), " in group '", name(), "':\n", recorder_.text()));
  return true;
}

bool GroupState::remember_failure(const CommError& error) noexcept {
  std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return false;
  failure_.emplace(error);
  failed_.store(true, std::memory_order_release);
  return true;
}

void GroupState::throw_failure() const {
  std::lock_guard lock(mutex_);
  throw *failure_;
}

void GroupState::throw_forked() const {
  throw StateError(str("process ", ::getpid(), " was forked from ", info_.title(place().rank, str("pid ", process_)),
                       " and cannot use its group '", name(),
                       "'; leave the engine to the rank's own process, or start the other one by spawn, not by fork"));
}

}  // namespace trireme::comm

namespace trireme {

std::vector<CallUnderWay> calls_under_way() {
  comm::LivingGroups& living = comm::living_groups();
  const std::lock_guard lock(living.mutex);
  std::vector<CallUnderWay> calls;
  for (const comm::GroupState* group : living.all)
    std::ranges::move(group->calls_under_way(), std::back_inserter(calls));
  return calls;
}

}  // namespace trireme
