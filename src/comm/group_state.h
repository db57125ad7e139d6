// What a rank keeps about a group whatever moves the data: who it is, what was called, and the first error, after which
// the group is dead.
#pragma once

#include <atomic>
#include <mutex>
#include <string>

#include "comm/call.h"
#include "comm/flight_recorder.h"
#include "trireme/base/error.h"

namespace trireme::comm {

class GroupState {
 public:
  GroupState(const Place& place, std::string name) : place_(place), name_(std::move(name)) {}
  GroupState(const GroupState&) = delete;
  GroupState& operator=(const GroupState&) = delete;

  const Place& place() const { return place_; }
  const std::string& name() const { return name_; }
  FlightRecorder& recorder() { return recorder_; }

  /// Throws the first error of this group, if there was one.
  void throw_if_failed() const {
    if (failed_.load(std::memory_order_acquire)) throw_failure();
  }
  /// From here on the group is dead; false: it was already.
  bool remember_failure(ErrorCode code, const std::string& message) noexcept;
  /// Level debug: `message` and the last operations.
  void log_failure(const std::string& message) noexcept;

  void count(const Call& call) noexcept {
    calls_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(bytes_sent(place_, call), std::memory_order_relaxed);
  }
  CommCounters counters() const noexcept { return {calls_.load(), bytes_.load()}; }

  /// "rank 2 gave up group 'world': no more data"
  std::string given_up(const std::string& reason) const {
    return str("rank ", place_.rank, " gave up group '", name_, "': ", reason);
  }

 private:
  [[noreturn]] void throw_failure() const;

  const Place place_;
  const std::string name_;
  FlightRecorder recorder_;
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> bytes_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  ErrorCode code_ = ErrorCode::kInternal;  // guarded by mutex_
  std::string message_;                    // guarded by mutex_
};

/// What a CommError that is thrown again in another rank must tell: the code and the text of the first cause.
class RelayedError : public CommError {
 public:
  RelayedError(ErrorCode code, const std::string& message, std::string cause)
      : CommError(code, message), cause_(std::move(cause)) {}
  const std::string& cause() const noexcept { return cause_; }

 private:
  std::string cause_;
};

}  // namespace trireme::comm
