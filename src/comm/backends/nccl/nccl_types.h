// NCCL's words for dtypes and reductions.
#pragma once

#include "comm/backends/nccl/nccl_api.h"

#include <c10/core/ScalarType.h>

#include <optional>

#include "trireme/comm/group.h"

namespace trireme::comm {

/// The NCCL type of `dtype`. None for 16-bit integers.
inline std::optional<ncclDataType_t> nccl_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return ncclFloat32;
    case at::kDouble:
      return ncclFloat64;
    case at::kHalf:
      return ncclFloat16;
    case at::kBFloat16:
      return ncclBfloat16;
    case at::kChar:
      return ncclInt8;
    case at::kByte:
    case at::kBool:  // 0 and 1: larger is or, smaller is and
      return ncclUint8;
    case at::kInt:
      return ncclInt32;
    case at::kLong:
      return ncclInt64;
    default:
      return std::nullopt;
  }
}

inline ncclRedOp_t nccl_op(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return ncclSum;
    case ReduceOp::kMean:
      return ncclAvg;
    case ReduceOp::kMax:
      return ncclMax;
    case ReduceOp::kMin:
      return ncclMin;
  }
  return ncclSum;
}

}  // namespace trireme::comm
