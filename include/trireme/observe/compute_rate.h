// From tokens per second to floating point work per second.
#pragma once

#include <optional>

namespace trireme {

/// How much work a token is, and who shares it. Work that is done twice (recomputation) does not count twice, so that
/// rates of runs with and without it compare.
struct ComputeRate {
  double flops_per_token = 0;              ///< of forward and backward; 0: not known, and no rate is
  int ranks = 1;                           ///< that share the tokens
  std::optional<double> peak_tflops = {};  ///< of one rank, dense, in the dtype that is computed in

  /// 10^12 floating point operations per second of one rank, when all ranks together take `tokens_per_s`.
  std::optional<double> tflops_per_rank(double tokens_per_s) const {
    if (!(flops_per_token > 0)) return std::nullopt;
    return tokens_per_s * flops_per_token / ranks / 1e12;
  }
  /// Model FLOPs utilization: the part of the peak that is used, 1 at the peak. Nothing where the peak is not known.
  /// Source    PaLM, arXiv:2204.02311, appendix B. Test: compute_rate_test.cpp.
  std::optional<double> mfu(double tokens_per_s) const {
    const auto rate = tflops_per_rank(tokens_per_s);
    if (!rate || !peak_tflops) return std::nullopt;
    return *rate / *peak_tflops;
  }
};

}  // namespace trireme
