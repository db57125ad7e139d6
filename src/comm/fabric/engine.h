// What the queues of one group share: the fabric, the record of operations, and the first error, after which the group
// is dead.
#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>

#include "comm/fabric/fabric.h"
#include "comm/flight_recorder.h"

namespace trireme::comm {

class Engine {
 public:
  Engine(std::shared_ptr<Segment> segment, const FabricOptions& options) : fabric_(std::move(segment), options) {}

  Fabric& fabric() { return fabric_; }
  FlightRecorder& recorder() { return recorder_; }
  const Place& place() const { return fabric_.place(); }

  /// Throws the first error of this group, if there was one.
  void throw_if_failed() const {
    if (failed_.load(std::memory_order_acquire)) throw_failure();
  }
  /// Marks the group dead here and tells peers, if `error` is a CommError. The first one counts.
  void fail(const std::exception_ptr& error) noexcept;
  /// The same for a reason that did not come from the fabric.
  void abort(const std::string& reason) noexcept;

  void count(const Call& call) noexcept {
    calls_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(bytes_sent(place(), call), std::memory_order_relaxed);
  }
  CommCounters counters() const noexcept { return {calls_.load(), bytes_.load()}; }

 private:
  [[noreturn]] void throw_failure() const;
  void record_failure(ErrorCode code, const std::string& message, const std::string& cause) noexcept;

  Fabric fabric_;
  FlightRecorder recorder_;
  std::atomic<int64_t> calls_{0};
  std::atomic<int64_t> bytes_{0};
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;
  ErrorCode code_ = ErrorCode::kInternal;  // guarded by mutex_
  std::string message_;                    // guarded by mutex_
};

}  // namespace trireme::comm
