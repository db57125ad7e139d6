// The order in which a step touches units: recorded once, followed afterwards, recorded anew when a step differs. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace trireme {

class Trace {
 public:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  static constexpr size_t kLongest = size_t{1} << 20;  ///< touches of a step that are recorded

  explicit Trace(int units) : uses_(units) {}

  /// A unit is touched.
  void touch(int unit);
  /// The step is over. The next one is expected to touch the same units in the same order.
  void end_step();

  /// Whether the coming touches are known.
  bool following() const { return following_; }
  /// Touches until `unit` is next used; kNever where it is not, or where nothing is known.
  int64_t distance_to(int unit) const;
  /// The touch that is `ahead` (1 = the next) after the current one; -1 past the end of the step.
  int upcoming(int64_t ahead) const;

 private:
  std::vector<int> recorded_;               // of this step
  std::vector<int> expected_;               // of the step before
  std::vector<std::vector<int64_t>> uses_;  // by unit: positions in expected_, ascending
  int64_t position_ = -1;                   // of the current touch in recorded_
  bool following_ = false;
};

}  // namespace trireme
