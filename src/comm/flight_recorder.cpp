#include "comm/flight_recorder.h"

#include <algorithm>

#include "trireme/base/format.h"

namespace trireme::comm {

int64_t FlightRecorder::begin(const Call& call) {
  std::lock_guard lock(mutex_);
  Entry& entry = entries_[static_cast<size_t>(count_ % kEntries)];
  entry.call = call;
  entry.start = Clock::now();
  entry.end = Clock::time_point::min();
  entry.failed = false;
  return count_++;
}

void FlightRecorder::end(int64_t ticket) { end(ticket, /*failed=*/false); }

void FlightRecorder::fail(int64_t ticket) { end(ticket, /*failed=*/true); }

void FlightRecorder::end(int64_t ticket, bool failed) {
  std::unique_lock lock(mutex_);
  if (ticket + kEntries < count_) return;  // overwritten meanwhile
  Entry& entry = entries_[static_cast<size_t>(ticket % kEntries)];
  entry.end = Clock::now();
  entry.failed = failed;
  if (failed || !has_listeners()) return;
  const Entry ended = entry;
  lock.unlock();
  Notice notice = notice_of(group_, ended.call, Notice::Kind::kCollective);
  notice.begin = ended.start;
  notice.end = ended.end;
  tell(notice);
}

std::vector<CallUnderWay> FlightRecorder::under_way() const {
  std::lock_guard lock(mutex_);
  std::vector<CallUnderWay> calls;
  for (int64_t index = std::max<int64_t>(0, count_ - kEntries); index < count_; ++index) {
    const Entry& entry = entries_[static_cast<size_t>(index % kEntries)];
    if (entry.end >= entry.start || entry.failed) continue;
    CallUnderWay call{.group = group_.name,
                      .number = entry.call.seq,
                      .text = describe(entry.call),
                      .rank = group_.world_rank(group_.place.rank),
                      .begin = entry.start};
    const bool is_message = entry.call.kind == CallKind::kSend || entry.call.kind == CallKind::kRecv;
    for (int rank = 0; rank < group_.place.size; ++rank)
      if (!is_message || rank == group_.place.rank || rank == entry.call.root)
        call.ranks.push_back(group_.world_rank(rank));
    calls.push_back(std::move(call));
  }
  return calls;
}

std::string FlightRecorder::text() const {
  std::lock_guard lock(mutex_);
  std::string all;
  for (int64_t index = std::max<int64_t>(0, count_ - kEntries); index < count_; ++index) {
    const Entry& entry = entries_[static_cast<size_t>(index % kEntries)];
    const double start_s = std::chrono::duration<double>(entry.start - created_).count();
    const bool is_under_way = entry.end < entry.start;
    const auto took_us = [&] { return std::chrono::duration<double, std::micro>(entry.end - entry.start).count(); };
    const std::string took =
        is_under_way ? "under way" : formatted("{} {:.1f} us", entry.failed ? "failed after" : "took", took_us());
    all += formatted("{} at {:.6f} s, {}\n", describe(entry.call), start_s, took);
  }
  return all;
}

}  // namespace trireme::comm
