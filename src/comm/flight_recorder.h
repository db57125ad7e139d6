// The last operations of a rank, always recorded: what one reads after a hang.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "comm/call.h"
#include "trireme/comm/calls.h"

namespace trireme::comm {

class FlightRecorder {
 public:
  /// Tells each call's end as a Notice, as one of `group`'s, which outlives this.
  explicit FlightRecorder(const GroupInfo& group) : group_(group) {}
  /// Returns a ticket for end().
  int64_t begin(const Call& call);
  void end(int64_t ticket);
  /// The same, of an operation that came to nothing.
  void fail(int64_t ticket);
  /// Oldest first, one operation a line.
  std::string text() const;
  /// The recorded operations that have not ended, oldest first.
  std::vector<CallUnderWay> under_way() const;

 private:
  static constexpr int64_t kEntries = 256;
  using Clock = std::chrono::steady_clock;
  struct Entry {
    Call call;
    Clock::time_point start;
    Clock::time_point end;  ///< before `start`: under way
    bool failed = false;
  };

  void end(int64_t ticket, bool failed);

  const GroupInfo& group_;
  const Clock::time_point created_ = Clock::now();
  mutable std::mutex mutex_;
  int64_t count_ = 0;                    // guarded by mutex_
  std::array<Entry, kEntries> entries_;  // guarded by mutex_
};

}  // namespace trireme::comm
