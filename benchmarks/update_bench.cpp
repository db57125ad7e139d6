// One optimizer step over a shard with 16-bit weights: unscale, clip, AdamW, rounding of the weights. Separate passes,
// against the library's one pass (optim/adam.h).
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
#include <cstdio>
#include <cstring>
#include <vector>

#include "optim/update.h"

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

void one_pass(Shard& shard) { update(shard.span, kOptions, kUnscale * kClip, ++shard.step); }

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
  Variant variants[] = {{"separate passes", separate_passes}, {"one pass", one_pass}};
  const at::Tensor gradients = shard.span.gradients.clone();
  for (Variant& variant : variants) variant.act(shard);  // every page is there
  for (int round = 0; round < (smoke ? 1 : 15); ++round)
    for (Variant& variant : variants) {
      shard.span.gradients.copy_(gradients);  // separate passes scale them in place, in the end to denormal numbers
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
