// One optimizer step over a shard with 16-bit weights: unscale, clip, AdamW, rounding of the weights. Separate passes,
// against the library's one pass (optim/adam.h, on a GPU optim/device_adam.h), and the mode `low` (optim/low.h).
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/full.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "benchmarks/flags.h"
#include "optim/device_adam.h"
#include "optim/device_update.h"
#include "optim/update.h"
#include "trireme/base/error.h"
#include "trireme/device/device.h"
#include "trireme/device/stream.h"

namespace {

using namespace trireme;

constexpr double kUnscale = 1.0 / 1024, kClip = 0.37;
const OptimizerOptions kOptions{.lr = 1e-3, .weight_decay = 0.01};

// Per element, at least: master, gradient and moments are read in fp32; master, moments and the weight are written.
constexpr double kBytes = 4 * 4 + 3 * 4 + 2;

struct Shard {
  UpdateSpan span;
  int64_t step = 0;
};

Shard make_shard(int64_t numel, c10::Device device) {
  const auto options = at::TensorOptions().device(device);
  const at::Tensor master = at::randn({numel}, options);
  return {{master, master.to(at::kBFloat16), at::randn({numel}, options), at::zeros({numel}, options),
           at::zeros({numel}, options)}};
}

/// A shard of the mode `low`; `rounding`: stochastic.
Shard make_low_shard(int64_t numel, const StochasticRounding* rounding) {
  const auto options = at::TensorOptions().dtype(at::kBFloat16);
  const at::Tensor weights = at::randn({numel}).to(at::kBFloat16);
  return {{weights, weights, at::randn({numel}).to(at::kBFloat16), at::zeros({numel}, options),
           at::zeros({numel}, options), rounding}};
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

/// Nothing is unscaled: gradients would be, in place.
void low(Shard& shard) { update(shard.span, kOptions, /*gradient_factor=*/1, ++shard.step); }

void one_pass(Shard& shard) { update(shard.span, kOptions, kUnscale * kClip, ++shard.step); }

/// Numbers of a device, in place of kernels' arguments.
struct DeviceNumbers {
  explicit DeviceNumbers(c10::Device device)
      : lr(at::full({}, kOptions.lr, at::TensorOptions().dtype(at::kFloat).device(device))),
        factor(at::full({}, kUnscale * kClip, lr.options())),
        step(at::zeros({}, lr.options())) {}
  at::Tensor lr, factor, step;
};

void separate_passes_on_device(Shard& shard, DeviceNumbers& numbers) {
  const UpdateSpan& s = shard.span;
  numbers.step.add_(1);
  at::_fused_adamw_(s.master, s.gradients, s.first, s.second, at::TensorList(), numbers.step, numbers.lr,
                    kOptions.beta1, kOptions.beta2, kOptions.weight_decay, kOptions.eps, /*amsgrad=*/false,
                    /*maximize=*/false, numbers.factor.reciprocal());
  s.weights.copy_(s.master);
}

void one_pass_on_device(Shard& shard, DeviceNumbers& numbers) {
  numbers.step.add_(1);
  update_on_device({{shard.span, numbers.step}}, kOptions, {.gradient_factor = numbers.factor}, numbers.lr,
                   has_adam_kernel(numbers.lr.device()));
}

struct Variant {
  const char* name;
  std::function<void(Shard&)> act;
  std::vector<double> ms = {};
};

std::vector<Variant> variants_on(c10::Device device, int64_t numel) {
  if (is_host(device)) {
    static const StochasticRounding rounding({{.begin = 0, .numel = numel, .parameter = 1, .first = 0}});
    const auto low_on = [&](const StochasticRounding* of) {
      return [shard = std::make_shared<Shard>(make_low_shard(numel, of))](Shard&) { low(*shard); };
    };
    return {{"separate passes", separate_passes},
            {"one pass", one_pass},
            {"low", low_on(nullptr)},
            {"low, stochastic", low_on(&rounding)}};
  }
  const auto numbers = std::make_shared<DeviceNumbers>(device);
  return {{"separate passes", [=](Shard& shard) { separate_passes_on_device(shard, *numbers); }},
          {"one pass", [=](Shard& shard) { one_pass_on_device(shard, *numbers); }}};
}

void measure(bool smoke, const std::string& device_name) {
  const c10::Device device = choose_device(device_name, 0);
  const int64_t numel = smoke ? 1'000'000 : 100'000'000;
  Shard shard = make_shard(numel, device);
  std::vector<Variant> variants = variants_on(device, numel);
  const at::Tensor gradients = shard.span.gradients.clone();
  for (Variant& variant : variants) variant.act(shard);  // every page is there, every kernel is loaded
  for (int round = 0; round < (smoke ? 1 : 15); ++round)
    for (Variant& variant : variants) {
      shard.span.gradients.copy_(gradients);  // separate passes scale them in place, in the end to denormal numbers
      Event::record(device).synchronize();
      const auto start = std::chrono::steady_clock::now();
      variant.act(shard);
      Event::record(device).synchronize();
      variant.ms.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count());
    }
  std::printf("%-16s %10s %10s %8s %14s\n", "variant", "min ms", "median ms", "ratio", "useful GB/s");
  double reference = 0;
  for (Variant& variant : variants) {
    std::sort(variant.ms.begin(), variant.ms.end());
    const double median = variant.ms[variant.ms.size() / 2];
    if (reference == 0) reference = median;
    std::printf("%-16s %10.2f %10.2f %8.2f %14.1f\n", variant.name, variant.ms.front(), median, reference / median,
                kBytes * static_cast<double>(numel) / median / 1e6);
  }
}

constexpr const char* kAbout =
    "one optimizer step over 100 M parameters with 16-bit weights, on one thread or one GPU: unscale, clip, AdamW,\n"
    "rounding of the weights. Separate passes (ATen's fused AdamW), against the library's one pass; on a CPU also the\n"
    "mode low, all in bf16, which unscales nothing here, as torch.optim rounds and with stochastic rounding.";

}  // namespace

int main(int argc, char** argv) {
  const at::NoGradGuard no_grad;
  at::set_num_threads(1);
  try {
    bool smoke = false;
    std::string device = "cpu";
    benchmarks::Flags("update_bench", kAbout)
        .text("--device", device, "cpu, cuda or cuda:N")
        .on("--smoke", smoke, "1 M parameters, one round: does it work?")
        .parse(argc, argv);
    measure(smoke, device);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "update_bench: %s\n", error.what());
    return 2;
  }
}
