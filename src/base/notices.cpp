#include "trireme/base/notices.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <utility>
#include <vector>

namespace trireme {

namespace notices {
std::atomic<int> listeners{0};

namespace {
std::atomic<int> methods{0};                           // that run
std::atomic<Notice::Clock::rep> last_method_ended{0};  // 0: none has
}  // namespace

void begin_method() noexcept { methods.fetch_add(1, std::memory_order_relaxed); }

void end_method() noexcept {
  last_method_ended.store(Notice::Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  methods.fetch_sub(1, std::memory_order_release);
}
}  // namespace notices

std::optional<Notice::Clock::time_point> outside_since() noexcept {
  if (notices::methods.load(std::memory_order_acquire) != 0) return std::nullopt;
  const Notice::Clock::rep ended = notices::last_method_ended.load(std::memory_order_relaxed);
  if (ended == 0) return std::nullopt;
  return Notice::Clock::time_point(Notice::Clock::duration(ended));
}

namespace {

struct Entry {
  int rank;
  std::thread::id thread;
  std::shared_ptr<NoticeListener> listener;
};

struct Entries {
  std::shared_mutex mutex;
  std::vector<Entry> all;   // guarded by mutex
  bool is_one_rank = true;  // guarded by mutex: what a thread does is that rank's
};

// For ever: a group's thread may tell while the process ends.
Entries& entries() {
  static auto* const made = new Entries;
  return *made;
}

void count(Entries& entries) {
  entries.is_one_rank =
      std::ranges::all_of(entries.all, [&](const Entry& entry) { return entry.rank == entries.all.front().rank; });
  notices::listeners.store(static_cast<int>(entries.all.size()), std::memory_order_relaxed);
}

}  // namespace

void tell(const Notice& notice) noexcept {
  Entries& listening = entries();
  const std::shared_lock lock(listening.mutex);
  for (const Entry& entry : listening.all) {
    const bool is_meant = notice.rank >= 0 ? notice.rank == entry.rank
                                           : listening.is_one_rank || entry.thread == std::this_thread::get_id();
    if (is_meant) entry.listener->hear(notice);
  }
}

Listening::Listening(int rank, std::shared_ptr<NoticeListener> listener) : listener_(std::move(listener)) {
  Entries& listening = entries();
  const std::lock_guard lock(listening.mutex);
  listening.all.push_back({rank, std::this_thread::get_id(), listener_});
  count(listening);
}

Listening::~Listening() {
  Entries& listening = entries();
  const std::lock_guard lock(listening.mutex);
  std::erase_if(listening.all, [this](const Entry& entry) { return entry.listener == listener_; });
  count(listening);
}

void NoticeScope::tell_end() const noexcept {
  tell({.kind = kind_, .name = name_, .of = of_, .begin = begin_, .end = Notice::Clock::now()});
}

}  // namespace trireme
