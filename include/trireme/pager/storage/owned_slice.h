// The part of a unit that a rank updates.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme {

/// The part of one trainable unit that this rank updates: elements [begin, begin + numel) of its flat buffer; the whole
/// unit at ZeRO stage 0.
struct OwnedSlice {
  int unit = 0;
  int64_t begin = 0;
  at::Tensor weights;    ///< [numel], the unit's dtype; writing it changes the parameters (after publish())
  at::Tensor gradients;  ///< [numel], accumulation dtype; valid between close_window() and the unit's publish()
  // Both on the host where the unit is offloaded, for use behind Pager::await_owned(). Weights on disk have memory only
  // behind Pager::bring_owned().
};

}  // namespace trireme
