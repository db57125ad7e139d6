// The part of a unit that a rank updates.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme {

class SliceStore;

/// Where owned weights are kept. Those of a disk have memory only while they are leased; elsewhere a lease has no
/// effect. Local. Throws IoError; StateError: a write has failed before.
class SliceHome {
 public:
  virtual ~SliceHome() = default;
  /// On return the weights are in memory, and those of later units on their way, until the unit's publish(), put_back()
  /// or drop().
  virtual void lease() {}
  /// They have changed.
  virtual void put_back() {}
  /// They have not changed.
  virtual void drop() noexcept {}
  /// `numel` of the weights, from `begin` on, on disk; null: they are in memory. Lives as long as this does.
  virtual SliceStore* store(int64_t, int64_t) { return nullptr; }
};

/// The part of one trainable unit that this rank updates: elements [begin, begin + numel) of its flat buffer; the whole
/// unit at ZeRO stage 0.
struct OwnedSlice {
  int unit = 0;
  int64_t begin = 0;
  at::Tensor weights;    ///< [numel], the unit's dtype; writing it changes the parameters (after publish())
  at::Tensor gradients;  ///< [numel], accumulation dtype; valid between close_window() and the unit's publish()
  // Both on the host where the unit is offloaded, for use behind Pager::await_owned().
  SliceHome* home = nullptr;  ///< of the weights; null: they are always in memory. Lives as long as the pager
};

}  // namespace trireme
