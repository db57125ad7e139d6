// The loops over flat gradient buffers: a fixed order of summation, in fp32, on every instruction set.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

#include "trireme/base/exact_sum.h"

namespace trireme {

/// Sum of squares of `numel` elements, in fp64 over sixteen interleaved lanes: the same bits whoever computes it.
double sum_of_squares(const void* data, at::ScalarType dtype, int64_t numel);

/// Adds the squares of `numel` elements to `sum`, by blocks of kAlignment elements from the start of a parameter:
/// shards are cut between blocks, so the sum over all ranks has the same bits at any number of ranks.
void add_squares(const void* data, at::ScalarType dtype, int64_t numel, ExactSum& sum);

/// One range of one gradient, as produced by every rank that has it.
struct ReduceTask {
  std::vector<const void*> sources;  ///< [numel] of source_dtype each, in rank order
  at::ScalarType source_dtype = at::kFloat;
  void* target = nullptr;  ///< [numel] of target_dtype
  at::ScalarType target_dtype = at::kFloat;
  int64_t numel = 0;
  float factor = 1;
  bool accumulate = false;  ///< target += instead of target =
};

/// target (+)= factor * (sources[0] + sources[1] + …), folded left in fp32. Returns the sum of squares of the new
/// target.
///
/// Cost      reads each source once, writes target once; blocks stay in the first-level cache in between.
double reduce(const ReduceTask& task);

/// The second half of the 4 * numel bytes at `data` holds `numel` elements of `dtype`; afterwards all of it holds them
/// in fp32.
void widen_upper_half(float* data, at::ScalarType dtype, int64_t numel);

}  // namespace trireme
