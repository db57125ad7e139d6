#include "pager/weights/trace.h"

#include <algorithm>

namespace trireme {

void Trace::touch(int unit) {
  if (position_ >= 0 && recorded_[position_] == unit) return;
  if (recorded_.size() == kLongest) {
    // A program that only evaluates never ends a step.
    recorded_.clear();
    position_ = -1;
  }
  recorded_.push_back(unit);
  ++position_;
  const bool as_expected = position_ < static_cast<int64_t>(expected_.size()) && expected_[position_] == unit;
  if (!as_expected) following_ = false;
}

void Trace::end_step() {
  position_ = -1;
  if (recorded_.empty()) {  // nothing ran, such as between zero_grad() and forward: what was expected is so still
    following_ = !expected_.empty();
    return;
  }
  expected_ = std::move(recorded_);
  recorded_.clear();
  following_ = true;
  for (auto& positions : uses_) positions.clear();
  for (size_t i = 0; i < expected_.size(); ++i) uses_[expected_[i]].push_back(static_cast<int64_t>(i));
}

int64_t Trace::distance_to(int unit) const {
  if (!following_) return kNever;
  const auto& positions = uses_[unit];
  const auto next = std::upper_bound(positions.begin(), positions.end(), position_);
  return next == positions.end() ? kNever : *next - position_;
}

int Trace::upcoming(int64_t ahead) const {
  const int64_t index = position_ + ahead;
  return following_ && index < static_cast<int64_t>(expected_.size()) ? expected_[index] : -1;
}

}  // namespace trireme
