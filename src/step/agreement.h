// The agreement of all ranks of a model at the end of an accumulation window.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "trireme/comm/group.h"
#include "trireme/pager/pager.h"

namespace trireme {

struct Agreement {
  at::Tensor sum_of_squares = {};        ///< [] fp64, of all gradients of the model, where the parameters are
  bool any_gradient = false;             ///< some rank has one
  std::optional<int> missing_here = {};  ///< this rank's first trainable parameter without a gradient
  std::optional<int> missing_rank = {};  ///< the first rank that has such a parameter
};

/// Facts that one rank knows of its own gradients.
struct GradientFlags {
  bool any_gradient = false;
  bool misses_gradient = false;
};

/// Exchanges the numbers above over all ranks of a model: more than the pager's group where a model has several pagers,
/// as with pipeline stages.
class StepAgreement {
 public:
  /// `model` contains the ranks of the pager's group, and outlives this. On a device collective over `model` where it
  /// `is_larger` than the pager's group.
  StepAgreement(Group& model, const Pager& pager, bool is_larger);

  /// Meets all ranks at the end of a window, after which it may be updated: calls begin_update(). Collective.
  ///
  /// Cost      one all-gather of about 600 bytes per rank. On a device one of one number per unit, for which the host
  ///           does not wait; where `model` is larger than the pager's group, whose ranks have the flags alike, also
  ///           one of 2 bytes per rank between the hosts, which does not wait for the device.
  Agreement meet(ClosedWindow& window) const;

 private:
  void exchange_on_host(const ClosedWindow& window, Agreement& agreement) const;
  void exchange_flags(Agreement& agreement) const;
  at::Tensor sum_on_device(const ClosedWindow& window) const;
  std::optional<int> first_missing(const ClosedWindow& window) const;

  Group& model_;
  const Pager& pager_;
  const bool is_larger_;
  int64_t most_units_;  ///< that a rank updates
};

}  // namespace trireme
