#include "comm/backends/c10d/group_numbers.h"

#include <algorithm>

namespace trireme::comm {

GroupNumbers::View GroupNumbers::view() const {
  const std::lock_guard lock(mutex_);
  return view_;
}

std::optional<int> GroupNumbers::agree(const std::vector<View>& views) {
  View all;
  for (const View& view : views) {
    all.next = std::max(all.next, view.next);
    all.taken |= view.taken;
  }
  if (all.taken.all()) return std::nullopt;
  while (all.taken[static_cast<size_t>(all.next % kCount)]) ++all.next;
  const std::lock_guard lock(mutex_);
  view_.next = all.next + 1;
  return static_cast<int>(all.next % kCount);
}

GroupNumbers::Lease GroupNumbers::take(int number) {
  const std::lock_guard lock(mutex_);
  view_.taken.set(static_cast<size_t>(number));
  return {shared_from_this(), number};
}

void GroupNumbers::give_back(int number) noexcept {
  const std::lock_guard lock(mutex_);
  view_.taken.reset(static_cast<size_t>(number));
}

}  // namespace trireme::comm
