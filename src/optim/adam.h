// Adam and AdamW of 16-bit weights in one pass over the shard.
#pragma once

#include <cstdint>

#include "optim/update.h"

namespace trireme {

/// Scales the gradients, moves the moments, updates the masters and rounds the weights, which are bf16 or fp16.
///
/// Cost      one pass: reads 14 or 16, writes 14 bytes per element. Some 1.6 times as fast as a pass each for scaling,
///           ATen's fused kernel and rounding: benchmarks/update_bench.cpp.
/// Source    arXiv:1412.6980, arXiv:1711.05101. Test: update_test.cpp.
void adam_in_one_pass(const UpdateSpan& span, const OptimizerOptions& optimizer, double gradient_factor, int64_t step);

}  // namespace trireme
