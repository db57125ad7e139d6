// Rounding to bf16 by chance, so that steps too small for bf16 move a weight in the mean.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace trireme {

/// Rounding of one slice of a unit. An fp32 value between two neighbours in bf16 becomes the upper one with the
/// probability of its distance from the lower one. The random numbers are those of the element's parameter, its place
/// in it and the step: the same wherever a shard begins, on every replica, and after a checkpoint.
class StochasticRounding {
 public:
  /// Elements of one parameter that lie in the slice side by side.
  struct Range {
    int64_t begin = 0;  ///< in the slice
    int64_t numel = 0;
    uint64_t parameter = 0;  ///< a number of its own, the same in every run
    int64_t first = 0;       ///< of the parameter's elements
  };
  enum Tensor : uint8_t { kWeights, kFirst, kSecond };  ///< each has random numbers of its own

  explicit StochasticRounding(std::vector<Range> ranges) : ranges_(std::move(ranges)) {}

  /// `to` [n] bf16, the elements of the slice from `begin` on, become `from` [n] fp32, rounded; the padding between
  /// parameters stays. Values that are not finite, and those that bf16 has, stay what they are. On the host.
  ///
  /// Source    Gupta et al., arXiv:1502.02551; random numbers by Philox, ATen's. Test: stochastic_rounding_test.cpp.
  void round(const at::Tensor& to, const at::Tensor& from, int64_t begin, int64_t step, Tensor tensor) const;

 private:
  std::vector<Range> ranges_;
};

}  // namespace trireme
