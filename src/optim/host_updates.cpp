#include "optim/host_updates.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceGuard.h>

#include <exception>
#include <utility>

namespace trireme {

HostUpdates::HostUpdates(Pager& pager)
    : pager_(pager), thread_([this, threads = at::get_num_threads()] { run(threads); }) {}

HostUpdates::~HostUpdates() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void HostUpdates::enqueue(ClosedWindow& window, int unit, std::function<void()> update) {
  window.defer_publish(unit);
  {
    const std::lock_guard lock(mutex_);
    waiting_.emplace(unit, std::move(update));
  }
  changed_.notify_all();
}

void HostUpdates::run(int threads) {
  at::set_num_threads(threads);  // OpenMP keeps the number by thread
  const c10::DeviceGuard device(pager_.device());
  const at::NoGradGuard no_grad;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    // Taken out now: as soon as it is published the program may enqueue the unit's next update.
    const auto chosen = waiting_.extract(next());
    lock.unlock();
    const int unit = chosen.key();
    try {
      pager_.await_owned(unit);
      chosen.mapped()();
      pager_.publish_deferred(unit);
    } catch (...) {
      pager_.publish_deferred(unit, std::current_exception());
    }
    lock.lock();
  }
}

int HostUpdates::next() const {
  for (const auto& [unit, update] : waiting_)
    if (pager_.is_owned_there(unit)) return unit;
  return waiting_.rbegin()->first;  // backward ends at the first unit, so that the last one comes first
}

}  // namespace trireme
