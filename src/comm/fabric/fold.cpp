#include "comm/fabric/fold.h"

#include <algorithm>
#include <type_traits>

#include "trireme/base/error.h"
#include "trireme/base/float16.h"
#include "trireme/base/vectorised.h"

#define TRIREME_INLINE __attribute__((always_inline)) inline

namespace trireme::comm {
namespace {

// The accumulators of a block stay in the first-level cache.
constexpr int64_t kBlock = 1024;

struct Add {
  template <class A>
  TRIREME_INLINE A operator()(A a, A b) const {
    if constexpr (std::is_integral_v<A>) {
      using Wrapping = std::make_unsigned_t<A>;
      return static_cast<A>(static_cast<Wrapping>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b)));
    } else {
      return a + b;
    }
  }
};
struct Larger {
  template <class A>
  TRIREME_INLINE A operator()(A a, A b) const {
    return a > b || a != a ? a : b;  // b is taken when it is NaN
  }
};
struct Smaller {
  template <class A>
  TRIREME_INLINE A operator()(A a, A b) const {
    return a < b || a != a ? a : b;
  }
};

struct Operands {
  std::byte* output;
  std::span<const std::byte* const> sources;
  int64_t numel;
  ReduceOp op;
};

template <class In, class Out, class Combine>
TRIREME_INLINE void fold_blocks(const Operands& operands, Combine combine, bool mean) {
  using A = decltype(widen(In{}));
  const size_t size = operands.sources.size();
  const A scale = mean ? static_cast<A>(1.0 / static_cast<double>(size)) : A(1);
  A sums[kBlock];
  for (int64_t begin = 0; begin < operands.numel; begin += kBlock) {
    const int64_t count = std::min(kBlock, operands.numel - begin);
    const In* first = reinterpret_cast<const In*>(operands.sources[0]) + begin;
    for (int64_t i = 0; i < count; ++i) sums[i] = widen(first[i]);
    for (size_t rank = 1; rank < size; ++rank) {
      const In* next = reinterpret_cast<const In*>(operands.sources[rank]) + begin;
      for (int64_t i = 0; i < count; ++i) sums[i] = combine(sums[i], static_cast<A>(widen(next[i])));
    }
    if (mean)
      for (int64_t i = 0; i < count; ++i) sums[i] *= scale;
    Out* out = reinterpret_cast<Out*>(operands.output) + begin;
    for (int64_t i = 0; i < count; ++i) out[i] = narrow<Out>(sums[i]);
  }
}

template <class In, class Out>
TRIREME_INLINE void fold_any(const Operands& operands) {
  switch (operands.op) {
    case ReduceOp::kSum:
      return fold_blocks<In, Out>(operands, Add{}, false);
    case ReduceOp::kMean:
      return fold_blocks<In, Out>(operands, Add{}, true);
    case ReduceOp::kMax:
      return fold_blocks<In, Out>(operands, Larger{}, false);
    case ReduceOp::kMin:
      return fold_blocks<In, Out>(operands, Smaller{}, false);
  }
}

// Cloned functions cannot be templates, so each type has one.
TRIREME_VECTORISED void fold_fp32(const Operands& o) { fold_any<float, float>(o); }
TRIREME_VECTORISED void fold_fp64(const Operands& o) { fold_any<double, double>(o); }
TRIREME_VECTORISED void fold_bf16(const Operands& o) { fold_any<BFloat16, BFloat16>(o); }
TRIREME_VECTORISED void fold_bf16_to_fp32(const Operands& o) { fold_any<BFloat16, float>(o); }
TRIREME_VECTORISED void fold_fp16(const Operands& o) { fold_any<Float16, Float16>(o); }
TRIREME_VECTORISED void fold_fp16_to_fp32(const Operands& o) { fold_any<Float16, float>(o); }
TRIREME_VECTORISED void fold_uint8(const Operands& o) { fold_any<uint8_t, uint8_t>(o); }
TRIREME_VECTORISED void fold_int8(const Operands& o) { fold_any<int8_t, int8_t>(o); }
TRIREME_VECTORISED void fold_int16(const Operands& o) { fold_any<int16_t, int16_t>(o); }
TRIREME_VECTORISED void fold_int32(const Operands& o) { fold_any<int32_t, int32_t>(o); }
TRIREME_VECTORISED void fold_int64(const Operands& o) { fold_any<int64_t, int64_t>(o); }

}  // namespace

void fold(const FoldKind& kind, std::byte* output, std::span<const std::byte* const> sources, int64_t numel) {
  const Operands operands{output, sources, numel, kind.op};
  const bool widens = kind.output != kind.input;
  switch (kind.input) {
    case at::kFloat:
      return fold_fp32(operands);
    case at::kDouble:
      return fold_fp64(operands);
    case at::kBFloat16:
      return widens ? fold_bf16_to_fp32(operands) : fold_bf16(operands);
    case at::kHalf:
      return widens ? fold_fp16_to_fp32(operands) : fold_fp16(operands);
    case at::kBool:  // 0 and 1: larger is or, smaller is and
    case at::kByte:
      return fold_uint8(operands);
    case at::kChar:
      return fold_int8(operands);
    case at::kShort:
      return fold_int16(operands);
    case at::kInt:
      return fold_int32(operands);
    case at::kLong:
      return fold_int64(operands);
    default:
      TRIREME_CHECK(false, "a fold of ", kind.input);
  }
}

}  // namespace trireme::comm
