// The arithmetic of one optimizer step over one range of flat memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "optim/stochastic_rounding.h"
#include "trireme/optim/optimizer.h"

namespace trireme {

/// `first` and `second` are the optimizer_states(), in that order.
struct UpdateSpan {
  at::Tensor master;                             ///< [n] fp32, or as the weights: the tensor that is updated
  at::Tensor weights;                            ///< [n] the model reads it; `master` itself, or its rounded result
  at::Tensor gradients;                          ///< [n] fp32 or 16 bit; may be overwritten by the scaled gradients
  at::Tensor first;                              ///< [n] of the master's dtype, or undefined
  at::Tensor second;                             ///< [n] of the master's dtype, or undefined
  const StochasticRounding* rounding = nullptr;  ///< in mode `low`; null: each operator rounds to the nearest
  int64_t begin = 0;                             ///< in the slice that `rounding` is of

  UpdateSpan slice(int64_t begin, int64_t end) const;
  bool has_master() const { return weights.scalar_type() != master.scalar_type(); }
  /// Mode `low`: weights are updated in their own 16 bits.
  bool is_low() const { return master.scalar_type() != at::kFloat; }
};

/// Updates `span` as step number `step` (1 is the first one), after its gradients were multiplied by `gradient_factor`.
///
/// Cost      fp32: one pass over memory (reads 16, writes 12 bytes per element with Adam, 4 more when gradients are
///           scaled). 16 bit: one pass with Adam and AdamW (adam.h); the others by blocks, whose conversion and
///           rounding hit the cache. `low`: by blocks, operator by operator (low.h); with `rounding` by blocks in fp32.
/// Source    Adam arXiv:1412.6980, AdamW arXiv:1711.05101, Adagrad jmlr.org/papers/v12/duchi11a.html, in fp32 by ATen's
///           fused kernels; Lion arXiv:2302.06675, by lion.h. Test: update_test.cpp.
void update(const UpdateSpan& span, const OptimizerOptions& optimizer, double gradient_factor, int64_t step);

}  // namespace trireme
