// Small models with what real ones have: views of weights, ties, parameters that are unused, frozen or oddly shaped.
#pragma once

#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>

#include <string>
#include <vector>

namespace trireme::testing {

/// Blocks of tanh(x w): one unit each, all of the same size.
struct ChainImpl : torch::nn::Module {
  explicit ChainImpl(int depth, int64_t width = 8) {
    for (int i = 0; i < depth; ++i) {
      blocks->push_back(torch::nn::Linear(torch::nn::LinearOptions(width, width).bias(false)));
    }
    register_module("blocks", blocks);
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<torch::nn::LinearImpl>()->forward(x).tanh();
    return x;
  }
  torch::nn::ModuleList blocks;
};
TORCH_MODULE(Chain);

inline at::Tensor loss_of(Chain& net) { return net->forward(at::randn({3, 8})).square().mean(); }

/// Three blocks that hold bare parameters, for tests that use them as they like.
struct LooseImpl : torch::nn::Module {
  explicit LooseImpl(const std::vector<std::vector<int64_t>>& shapes) {
    for (size_t i = 0; i < shapes.size(); ++i) {
      auto block = std::make_shared<torch::nn::Module>("block");
      weights.push_back(block->register_parameter("weight", at::randn(shapes[i])));
      register_module("blocks" + std::to_string(i), block);
    }
  }
  at::Tensor& operator[](size_t i) { return weights[i]; }
  std::vector<at::Tensor> weights;
};
TORCH_MODULE(Loose);

}  // namespace trireme::testing
