// Rotary position embeddings, as Hugging Face's Llama computes them (halves rotated, not pairs).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme {

/// cos and sin of the angles of consecutive positions, [S, 1, D / 2] each: both halves of a head turn by the same
/// angles.
struct RopeAngles {
  at::Tensor cos;
  at::Tensor sin;
};

/// Computes angles in fp32 and keeps them, rounded to the dtype they were asked for. It is no buffer of a module:
/// casting a model to 16 bits would round the angles before the cosine is taken. Not thread-safe, like the module that
/// owns it.
class RopeCache {
 public:
  RopeCache(int64_t head_dim, double theta) : head_dim_(head_dim), theta_(theta) {}

  /// Angles of positions [begin, begin + count).
  RopeAngles angles(int64_t begin, int64_t count, const at::TensorOptions& options);
  /// Those of `positions` [1, S], computed anew.
  RopeAngles angles(const at::Tensor& positions, const at::TensorOptions& options) const;

 private:
  void compute(int64_t positions, const at::TensorOptions& options);

  int64_t head_dim_;
  double theta_;
  RopeAngles cached_;
};

/// Turns each head of `x` [B, S, heads, D] by the angles of its position.
at::Tensor apply_rope(const at::Tensor& x, const RopeAngles& angles);

}  // namespace trireme
