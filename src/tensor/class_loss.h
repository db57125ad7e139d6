// Cross entropy over classes of which each rank has some.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>

#include "trireme/activations/exchanges.h"

namespace trireme::tensor {

/// Cross entropy [N] of `logits` [N, C], of which each rank has columns of C, beside `targets` [N] over all of C: 0
/// where a target is `ignored`.
///
/// Cost      three numbers for each of N, and the greatest logit; logits are not gathered.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, const Cut& cut, int64_t ignored,
                         double label_smoothing, const std::shared_ptr<AxisExchanges>& exchanges);

}  // namespace trireme::tensor
