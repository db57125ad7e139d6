// How a pager shards a model, and where it keeps the shards.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/device/disk.h"
#include "trireme/pager/layout/layout.h"

namespace trireme {

/// How a released unit becomes whole again at ZeRO stage 3.
enum class GatherPolicy {
  kAuto,    ///< kShared where the group shares memory, else kCopy
  kShared,  ///< all ranks' shards are one mapped segment: a gather moves no byte
  kCopy,    ///< an all-gather into an arena buffer, released when it is no longer needed
};

/// The options of a pager.
struct PagerPolicy {
  int stage = 0;  ///< ZeRO stage, 0-3
  GatherPolicy gather = GatherPolicy::kAuto;
  /// kCopy: gathered units may take this many bytes, and always as many as the two largest units.
  int64_t live_bytes = std::numeric_limits<int64_t>::max();
  /// kCopy: bytes of units gathered ahead of their use, by the recorded trace.
  int64_t prefetch_bytes = 64 << 20;
  /// Gradients are summed over ranks and micro-batches in this dtype (fp32 or the parameter's own).
  at::ScalarType accumulation_dtype = at::kFloat;
  /// Gradients are summed as one left fold over the window's micro-batches, each over the ranks in order, and
  /// norms over fixed blocks: the same bits at any number of ranks and any ZeRO stage. Needs end_backward() at the end
  /// of each backward pass, and at most one gradient per parameter in a pass. Reduces in each backward pass, at every
  /// ZeRO stage.
  bool deterministic = false;
  /// How ranks' gradients are reduced: kMean or kSum.
  ReduceOp gradient_op = ReduceOp::kMean;
  /// Gradients are divided by this before they travel, and their sum is multiplied by it: sums of a 16-bit dtype stay
  /// in its range. Without effect under kShared at ZeRO stage 3, which sums in fp32.
  double predivide_factor = 1;
  /// kCopy: fill released buffers with NaNs, so that a missed gather cannot pass unnoticed. For tests.
  bool poison = false;
  /// On a device: weights, gradients and gathered units, which collectives move again and again, are in memory that the
  /// group has registered (Group::buffer_registration()). At ZeRO stages 2 and 3 gradients are copied into a buffer to
  /// send; at ZeRO stage 3 the memory for gathered units, `live_bytes`, is allocated at once.
  bool register_buffers = false;
  /// For parameters on a device, at ZeRO stages 1 to 3: the share of elements (or a little more) whose owned weights
  /// and gradients are kept, and updated, in page-locked memory of the host. The units that forward uses first go there
  /// last, since their new weights are needed first. 0: none.
  double offload_ratio = 0;
  /// ZeRO stage 3: shards of such units, and of frozen ones, are kept on the host only; a gather copies them to the
  /// device.
  bool offload_parameters = false;
  /// ZeRO stage 3 with kCopy, on hosts: shards, frozen ones too, are on disk; a gather reads them. Not for optimizers
  /// that need more than one unit at a time (Lamb, Muon, a client's).
  DiskSpace disk = {.buffers = 5};
  UnitRules units = {};
  bool operator==(const PagerPolicy&) const = default;
};

/// By unit: whether it is updated on the host. Chooses units with at least the share `ratio` (0 to 1) of all trainable
/// elements.
std::vector<bool> offloaded_units(const Layout& layout, double ratio);

}  // namespace trireme
