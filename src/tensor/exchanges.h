// The exchanges of a tensor group, with their gradients.
//
// Two laws: a tensor that every rank has whole has its whole gradient on every rank, the same; a slice has the gradient
// of its own elements. Where ranks share elements, each has a part of their gradient.
#pragma once

#include <ATen/core/Tensor.h>

#include "tensor/slices.h"
#include "trireme/comm/group.h"

namespace trireme::tensor {

/// `whole`, from which each rank goes on to compute a part: its gradient is the sum of the ranks'.
at::Tensor entered(const at::Tensor& whole, Group& group);
/// The sum of the ranks' parts of a sum, on every rank. Cost: one all-reduce.
at::Tensor summed(const at::Tensor& part, Group& group);
/// The tensor of which each rank has `slice`, on every rank. Cost: one all-gather.
at::Tensor gathered(const at::Tensor& slice, const DimCut& cut, Group& group);
/// `slice` of a parameter, some elements of which other ranks have too, with a gradient to which all of them add.
at::Tensor shared(const at::Tensor& slice, const DimCut& cut, Group& group);

/// This rank's slice of `whole`; a view where one interval of a dim is asked for. Local.
at::Tensor slice_of(const at::Tensor& whole, const DimCut& cut, int rank);

/// Cross entropy [N] of `logits` [N, C], of which each rank has columns of C, beside `targets` [N] over all of C: 0
/// where a target is `ignored`.
///
/// Cost      three numbers for each of N, and the greatest logit; logits are not gathered.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, const DimCut& cut, int64_t ignored,
                         double label_smoothing, Group& group);

}  // namespace trireme::tensor
