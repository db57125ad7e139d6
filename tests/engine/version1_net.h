// The model and the steps behind tests/checkpoint/fixtures/version1, which two ranks saved at ZeRO stage 3.
#pragma once

#include <ATen/ops/arange.h>
#include <ATen/ops/tensor.h>
#include <torch/nn/module.h>

#include <vector>

#include "trireme/engine/engine.h"

namespace trireme::version1 {

inline constexpr int kSteps = 3;

inline int64_t numel_of(const std::vector<int64_t>& shape) {
  int64_t numel = 1;
  for (const int64_t extent : shape) numel *= extent;
  return numel;
}

/// 0, 1/16, 2/16, …
inline at::Tensor ramp(const std::vector<int64_t>& shape, int64_t first = 0) {
  return at::arange(first, first + numel_of(shape)).to(at::kFloat).div(16).view(shape);
}

/// 1/8, 2/8, …: the gradient in every step.
inline at::Tensor slope(const std::vector<int64_t>& shape) {
  return at::arange(1, 1 + numel_of(shape)).to(at::kFloat).div(8).view(shape);
}

struct Linear : torch::nn::Module {
  at::Tensor weight;
};

/// Tied, frozen and trained parameters and two buffers; `seed` 0 gives the values that were trained.
struct Net : torch::nn::Module {
  explicit Net(int64_t seed = 0) {
    weight = register_parameter("weight", ramp({3, 5}, seed));
    bias = register_parameter("bias", ramp({5}, seed));
    embed = register_module("embed", std::make_shared<Linear>());
    embed->weight = embed->register_parameter("weight", ramp({7, 2}, seed));
    head = register_module("head", std::make_shared<Linear>());
    head->weight = head->register_parameter("weight", embed->weight);
    frozen = register_parameter("frozen", ramp({2, 2}, seed), /*requires_grad=*/false);
    scale = register_buffer("scale", ramp({3}, seed));
    count = register_buffer("count", at::tensor(11 + seed));
  }
  at::Tensor forward() {
    at::Tensor loss;
    for (const at::Tensor& parameter : {weight, bias, embed->weight}) {
      const at::Tensor term = (parameter * slope(parameter.sizes().vec()).to(parameter.scalar_type())).sum(at::kFloat);
      loss = loss.defined() ? loss + term : term;
    }
    return loss;
  }
  at::Tensor weight, bias, frozen, scale, count;
  std::shared_ptr<Linear> embed, head;
};

inline InitializeOptions options(int ranks, int stage) {
  Config config = default_config(ranks);
  config.batch = {ranks, 1, 1};
  config.optimizer = OptimizerOptions{.lr = 0.125, .beta1 = 0.5, .beta2 = 0.75, .weight_decay = 0.25};
  config.gradient_clipping = 0;
  config.precision.weight_dtype = at::kHalf;
  config.precision.loss_scale.initial_scale_power = 4;
  config.pager.stage = stage;
  return {.config = config, .parameter_groups = {{.patterns = {"bias$"}, .lr = 0.25, .weight_decay = 0}}};
}

}  // namespace trireme::version1
