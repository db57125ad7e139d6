// The numbers by which gradients are divided between backward and the optimizer, and where.
//
// The loss scale is none of them: StepDecider has it (on a device as a tensor), and what it decides brings its inverse
// to the optimizer together with clipping.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "trireme/pager/layout/policy.h"
#include "trireme/pager/layout/shard_mesh.h"

namespace trireme {

struct GradientScale {
  GradientScale(const PagerPolicy& policy, const ShardMesh& mesh)
      : mean_over(policy.gradient_op == ReduceOp::kSum ? 1 : static_cast<double>(mesh.divisor())),
        predivide(policy.predivide_factor) {}

  double mean_over;                ///< ShardMesh::divisor(); 1: gradients are summed
  double predivide;                ///< PagerPolicy::predivide_factor; 1 where no sum on the way has a narrow range
  int64_t accumulation_steps = 1;  ///< micro-batches of a window

  /// Factor of a rank's gradients as they leave for a sum, and of that sum.
  float before_reduce() const { return static_cast<float>(1 / predivide); }
  float after_reduce() const { return static_cast<float>(of_this_rank() / mean_over * predivide); }
  /// Factor of the gradients of one rank alone.
  double of_this_rank() const { return 1.0 / static_cast<double>(accumulation_steps); }
};

inline void multiply(const at::Tensor& gradients, float factor) {
  if (factor != 1) gradients.mul_(factor);
}

}  // namespace trireme
