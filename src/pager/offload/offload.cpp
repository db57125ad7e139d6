#include "pager/offload/offload.h"

#include <chrono>

#include "pager/layout/gradient_dtypes.h"
#include "trireme/base/wait_hook.h"

namespace trireme {

namespace {
constexpr std::chrono::milliseconds kPollEvery{20};
}

void Offload::decide(const Layout& layout, const PagerPolicy& policy) {
  const size_t units = layout.units.size();
  owns_ = offloaded_units(layout, policy.offload_ratio);
  keeps_shard_.assign(units, false);
  expected_.assign(units, 0);
  for (size_t i = 0; i < units; ++i) {
    keeps_shard_[i] = policy.offload_parameters && (owns_[i] || !layout.units[i].trainable);
    is_empty_ &= !owns_[i] && !keeps_shard_[i];
  }
}

void Offload::reserve(const Layout& layout, const PagerPolicy& policy, c10::Device device) {
  int64_t bytes = 0;
  for (size_t i = 0; i < layout.units.size(); ++i) {
    const UnitLayout& unit = layout.units[i];
    const auto gradient = static_cast<int64_t>(c10::elementSize(accumulation_dtype(unit, policy)));
    if (owns_[i] || keeps_shard_[i]) bytes += unit.shard_numel * static_cast<int64_t>(c10::elementSize(unit.dtype));
    if (owns_[i]) bytes += unit.shard_numel * gradient;
  }
  memory_ = PinnedArena(bytes, device);
}

void Offload::expect(int unit) {
  const std::lock_guard lock(mutex_);
  expected_[unit] = 1;
  ++expected_count_;
}

void Offload::arrive(int unit, const std::exception_ptr& problem) {
  {
    const std::lock_guard lock(mutex_);
    if (problem && !problem_) problem_ = problem;
    expected_[unit] = 0;
    if (!problem) --expected_count_;
  }
  changed_.notify_all();
}

void Offload::await_if(const std::function<bool()>& is_there) {
  const WaitScope host;  // a Python program's other threads go on, and Ctrl-C is heard
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kPollEvery, [&] { return problem_ || is_there(); })) {
    lock.unlock();
    host.poll();
    lock.lock();
  }
  // Weights that are half new stay so: every later use fails alike.
  if (problem_) std::rethrow_exception(problem_);
}

void Offload::await(int unit) {
  if (expected_count_ > 0) await_if([&] { return expected_[unit] == 0; });
}

void Offload::await_all() {
  if (expected_count_ > 0) await_if([&] { return expected_count_ == 0; });
}

}  // namespace trireme
