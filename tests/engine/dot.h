// The smallest model that shows what a step did, and what tests of the engine share.
#pragma once

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/engine/engine.h"

namespace trireme::testing {

inline Config sgd_config(int world, int64_t accumulation = 1) {
  Config config = default_config(world);
  config.batch = {accumulation * world, 1, accumulation};
  config.optimizer = OptimizerOptions{.kind = OptimizerKind::kSgd, .lr = 0.5};
  config.gradient_clipping = 0;
  return config;
}

/// One parameter `w` = (2, 3); forward(x) is w . x, whose gradient is x.
struct DotImpl : torch::nn::Module {
  DotImpl() { w = register_parameter("w", torch::tensor({2.0f, 3.0f})); }
  at::Tensor forward(const at::Tensor& x) { return (w * x).sum(); }
  at::Tensor w;
};
TORCH_MODULE(Dot);

inline at::Tensor vec(float a, float b) { return torch::tensor({a, b}); }
inline std::vector<float> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kFloat).clone().contiguous();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}
using Floats = std::vector<float>;

}  // namespace trireme::testing
