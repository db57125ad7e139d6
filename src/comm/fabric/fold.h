// The one place where numbers of several ranks are added.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "trireme/comm/group.h"

namespace trireme::comm {

struct FoldKind {
  at::ScalarType input;
  at::ScalarType output;  ///< `input`, or fp32 for bf16 and fp16
  ReduceOp op;
};

/// output[i] = fold of sources[0][i], sources[1][i], ... in that order, in fp32 (fp64 for fp64, the type itself for
/// integers), rounded once. `output` may be one of the sources. A NaN among the inputs gives a NaN, for every op.
void fold(const FoldKind& kind, std::byte* output, std::span<const std::byte* const> sources, int64_t numel);

}  // namespace trireme::comm
