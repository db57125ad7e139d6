#include "comm/group_state.h"

#include "trireme/base/log.h"

namespace trireme::comm {

void GroupState::fail(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const RelayedError& failure) {
    record_failure(failure.code(), failure.what(), failure.cause());
  } catch (const CommError& failure) {
    record_failure(failure.code(), failure.what(), failure.what());
  } catch (const StateError&) {
    // As the declaration says.
  } catch (const std::exception& interruption) {  // of the host: a WaitHook threw
    abort(interruption.what());
  }
}

void GroupState::abort(const std::string& reason) noexcept {
  const std::string message = str("rank ", place_.rank, " gave up group '", name_, "': ", reason);
  record_failure(ErrorCode::kPeerLost, message, message);
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
      StateError(str("group '", name_, "' was destroyed before ", describe(call), " was complete")));
}

void GroupState::record_failure(ErrorCode code, const std::string& message, const std::string& cause) noexcept {
  if (is_forked() || !remember_failure(code, message)) return;
  tell_peers(code, cause);
  log(LogLevel::kDebug,
      str(message, "\nlast operations of rank ", place_.rank, " in group '", name_, "':\n", recorder_.text()));
}

bool GroupState::remember_failure(ErrorCode code, const std::string& message) noexcept {
  std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return false;
  code_ = code;
  message_ = message;
  failed_.store(true, std::memory_order_release);
  return true;
}

void GroupState::throw_failure() const {
  std::lock_guard lock(mutex_);
  throw CommError(code_, message_);
}

void GroupState::throw_forked() const {
  throw StateError(str("process ", ::getpid(), " was forked from rank ", place_.rank, " (pid ", process_,
                       ") and cannot use its group '", name_,
                       "'; leave the engine to the rank's own process, or start the other one by spawn, not by fork"));
}

}  // namespace trireme::comm
