// One launch of Adam or AdamW on a device, where the numbers of a step are. Compiled by NVRTC when a GPU is used, and
// by the host's compiler, which packs calls and runs them in tests (device_adam.cpp).
#pragma once

#include "optim/adam_element.h"

namespace trireme {

enum AdamType : int { kAdamFloat, kAdamBFloat16, kAdamFloat16 };

/// A range of flat memory.
struct AdamRun {
  float* master;
  void* weights;  ///< bf16 or fp16
  const void* gradients;
  float* first;
  float* second;
  const float* step;  ///< the number of the update
  long long numel;
  int begin;  ///< its first block
  unsigned char weights_type, gradients_type;
};

/// The argument of one launch, which may have 4096 bytes.
struct AdamCall {
  static constexpr int kThreads = 256;  ///< per block
  static constexpr int kMaxRuns = 56;
  static constexpr int kBlock = 8192;  ///< elements per block

  const float* lr;
  const float* gradient_factor;  ///< null: 1
  const float* skip;             ///< 1 where nothing may change; null: never
  double beta1, beta2, eps, weight_decay;
  bool is_decoupled;
  int count;
  AdamRun runs[kMaxRuns];
};
static_assert(sizeof(AdamRun) == 64 && sizeof(AdamCall) == 64 + AdamCall::kMaxRuns * 64 && sizeof(AdamCall) <= 4096,
              "both compilers lay it out alike, and launches take no more");

inline bool is_skipped(const AdamCall& call) { return call.skip != nullptr && *call.skip != 0; }

inline const AdamRun& run_of(const AdamCall& call, int block) {
  int run = 0;
  while (run + 1 < call.count && call.runs[run + 1].begin <= block) ++run;
  return call.runs[run];
}

inline AdamFactors factors_of(const AdamCall& call, const AdamRun& run) {
  const double gradient = call.gradient_factor == nullptr ? 1 : *call.gradient_factor;
  return adam_factors(moment_factors(call.beta1, call.beta2, call.eps, gradient, *run.step), *call.lr,
                      call.weight_decay, call.is_decoupled);
}

/// The elements of `thread`, one of `threads`, in one block.
template <class Weight, class Gradient>
inline void update_elements(const AdamRun& run, int block, int thread, int threads, const AdamFactors& f) {
  const long long begin = (block - run.begin) * static_cast<long long>(AdamCall::kBlock);
  const long long rest = run.numel - begin;
  const int count = rest < AdamCall::kBlock ? static_cast<int>(rest) : AdamCall::kBlock;
  float* const master = run.master + begin;
  Weight* const weights = static_cast<Weight*>(run.weights) + begin;
  const Gradient* const gradients = static_cast<const Gradient*>(run.gradients) + begin;
  float* const first = run.first + begin;
  float* const second = run.second + begin;
  // Several elements are on their way from memory before the first is computed: memory is what this waits for.
  constexpr int kAhead = 4;
  struct {
    float master, gradient, first, second;
    Weight weight;
  } e[kAhead];
  int i = thread;
  for (; i + (kAhead - 1) * threads < count; i += kAhead * threads) {
    for (int k = 0; k < kAhead; ++k) {
      const int at = i + k * threads;
      e[k].master = master[at];
      e[k].gradient = widen(gradients[at]);
      e[k].first = first[at];
      e[k].second = second[at];
    }
    for (int k = 0; k < kAhead; ++k) {
      const int at = i + k * threads;
      update_adam(e[k].master, e[k].weight, e[k].gradient, e[k].first, e[k].second, f);
      master[at] = e[k].master;
      weights[at] = e[k].weight;
      first[at] = e[k].first;
      second[at] = e[k].second;
    }
  }
  for (; i < count; i += threads) update_adam(master[i], weights[i], widen(gradients[i]), first[i], second[i], f);
}

template <class Weight>
inline void update_block_of(const AdamRun& run, int block, int thread, int threads, const AdamFactors& f) {
  if (run.gradients_type == kAdamBFloat16) return update_elements<Weight, BFloat16>(run, block, thread, threads, f);
  if (run.gradients_type == kAdamFloat16) return update_elements<Weight, Float16>(run, block, thread, threads, f);
  update_elements<Weight, float>(run, block, thread, threads, f);
}

inline void update_block(const AdamRun& run, int block, int thread, int threads, const AdamFactors& f) {
  if (run.weights_type == kAdamFloat16) return update_block_of<Float16>(run, block, thread, threads, f);
  update_block_of<BFloat16>(run, block, thread, threads, f);
}

}  // namespace trireme

#ifdef __CUDACC_RTC__
extern "C" __global__ void __launch_bounds__(trireme::AdamCall::kThreads)
    trireme_adam(const __grid_constant__ trireme::AdamCall call) {
  __shared__ trireme::AdamFactors factors;  // two powers in fp64: once per block
  if (trireme::is_skipped(call)) return;
  const int block = static_cast<int>(blockIdx.x);
  const trireme::AdamRun& run = trireme::run_of(call, block);
  if (threadIdx.x == 0) factors = trireme::factors_of(call, run);
  __syncthreads();
  trireme::update_block(run, block, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), factors);
}
#endif
