// One optimizer step over a shard with 16-bit weights: unscale, clip, AdamW, rounding of the weights. Separate passes,
// against the library's blocks (optim/update.h), against a kernel that does all in one pass: the candidate that would
// have to be 1.3 times as fast to be worth its code.
//
//   update_bench [--smoke]     100 M parameters, one thread; --smoke: 1 M, one round
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "optim/update.h"
#include "trireme/base/vectorised.h"

namespace {

using namespace trireme;

constexpr double kUnscale = 1.0 / 1024, kClip = 0.37;
const OptimizerOptions kOptions{.lr = 1e-3, .weight_decay = 0.01};

struct Shard {
  UpdateSpan span;
  int64_t step = 0;
};

Shard make_shard(int64_t numel) {
  const at::Tensor master = at::randn({numel});
  return {{master, master.to(at::kBFloat16), at::randn({numel}), at::zeros({numel}), at::zeros({numel})}};
}

void separate_passes(Shard& shard) {
  const UpdateSpan& s = shard.span;
  s.gradients.mul_(kUnscale);
  s.gradients.mul_(kClip);
  const at::Tensor step = at::scalar_tensor(static_cast<double>(++shard.step), at::kFloat);
  at::_fused_adamw_(s.master, s.gradients, s.first, s.second, at::TensorList(), step, kOptions.lr, kOptions.beta1,
                    kOptions.beta2, kOptions.weight_decay, kOptions.eps, /*amsgrad=*/false, /*maximize=*/false);
  s.weights.copy_(s.master);
}

void blocks(Shard& shard) { update(shard.span, kOptions, kUnscale * kClip, ++shard.step); }

// Without errno: a square root that may set it is a call.
TRIREME_VECTORISED void adamw_in_one_pass(float* __restrict master, uint16_t* __restrict weights,
                                          const float* __restrict gradients, float* __restrict first,
                                          float* __restrict second, int64_t numel, int64_t step) {
  const auto t = static_cast<double>(step);
  const auto beta1 = static_cast<float>(kOptions.beta1), beta2 = static_cast<float>(kOptions.beta2);
  const auto step_size = static_cast<float>(kOptions.lr / (1 - std::pow(kOptions.beta1, t)));
  const auto unbias2 = static_cast<float>(1 / std::sqrt(1 - std::pow(kOptions.beta2, t)));
  const auto shrink = static_cast<float>(1 - kOptions.lr * kOptions.weight_decay);
  const auto eps = static_cast<float>(kOptions.eps), factor = static_cast<float>(kUnscale * kClip);
  for (int64_t i = 0; i < numel; ++i) {
    const float gradient = gradients[i] * factor;
    const float m = first[i] + (1 - beta1) * (gradient - first[i]);
    const float v = beta2 * second[i] + (1 - beta2) * gradient * gradient;
    const float updated = master[i] * shrink - step_size * m / (__builtin_sqrtf(v) * unbias2 + eps);
    first[i] = m;
    second[i] = v;
    master[i] = updated;
    uint32_t bits = 0;
    __builtin_memcpy(&bits, &updated, sizeof bits);
    weights[i] = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);  // to the nearest, ties to even
  }
}

void one_pass(Shard& shard) {
  const UpdateSpan& s = shard.span;
  adamw_in_one_pass(s.master.data_ptr<float>(), static_cast<uint16_t*>(s.weights.data_ptr()),
                    s.gradients.const_data_ptr<float>(), s.first.data_ptr<float>(), s.second.data_ptr<float>(),
                    s.master.numel(), ++shard.step);
}

struct Variant {
  const char* name;
  void (*act)(Shard&);
  std::vector<double> ms = {};
};

}  // namespace

int main(int argc, char** argv) {
  const bool smoke = argc > 1 && std::strcmp(argv[1], "--smoke") == 0;
  const at::NoGradGuard no_grad;
  at::set_num_threads(1);
  Shard shard = make_shard(smoke ? 1'000'000 : 100'000'000);
  Variant variants[] = {{"separate passes", separate_passes}, {"blocks", blocks}, {"one pass", one_pass}};
  for (Variant& variant : variants) variant.act(shard);  // every page is there
  for (int round = 0; round < (smoke ? 1 : 15); ++round)
    for (Variant& variant : variants) {
      const auto start = std::chrono::steady_clock::now();
      variant.act(shard);
      variant.ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
  std::printf("%-16s %10s %10s %8s\n", "variant", "min ms", "median ms", "ratio");
  double reference = 0;
  for (Variant& variant : variants) {
    std::sort(variant.ms.begin(), variant.ms.end());
    const double median = variant.ms[variant.ms.size() / 2];
    if (reference == 0) reference = median;
    std::printf("%-16s %10.2f %10.2f %8.2f\n", variant.name, variant.ms.front(), median, reference / median);
  }
  return 0;
}
