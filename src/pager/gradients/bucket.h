// One unit's gradients on this rank, summed in one flat buffer.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "trireme/pager/layout/layout.h"

namespace trireme {

struct Bucket {
  at::Tensor sum;             ///< [numel of the unit]; undefined until the first gradient
  std::vector<uint8_t> seen;  ///< by position in the unit; empty: not open
  int arrived = 0;

  /// Nothing has arrived.
  void begin(const UnitLayout& unit);
  /// `gradient` [numel] of the parameter at `position` of `unit`.
  void add(const UnitLayout& unit, int position, const at::Tensor& gradient);
  /// The sum of the parameter at `position` of `unit`, [numel]; undefined where no gradient of it has arrived.
  at::Tensor sum_of(const UnitLayout& unit, int position) const;
  /// Where the buffer is used again, what did not arrive still holds the last window's gradient.
  void zero_what_is_missing(const UnitLayout& unit);
};

}  // namespace trireme
