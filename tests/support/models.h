// Small models and their micro-batches, for tests that train them in several ways.
#pragma once

#include <torch/nn/functional/loss.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/utils.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace trireme::testing {

/// Which micro-batch of the job: `number` counts over all ranks, `round` how many each rank has had before.
struct MicroBatch {
  int64_t number = 0;
  int64_t round = 0;
};

/// A model, and its loss on a micro-batch (a pure function of it and the weights).
struct TrainedModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const MicroBatch&)> loss;
};

inline at::Generator generator_of(const MicroBatch& batch) {
  return at::detail::createCPUGenerator(1000 + batch.number);
}

inline at::Tensor tokens_of(const MicroBatch& batch, int64_t vocab_size, at::IntArrayRef shape) {
  return at::randint(vocab_size, shape, generator_of(batch), at::kLong);
}

/// Random numbers [shape] in the dtype of the module's weights, on their device.
inline at::Tensor input_of(const torch::nn::Module& module, const MicroBatch& batch, at::IntArrayRef shape) {
  return at::randn(shape, generator_of(batch)).to(module.parameters().front().options());
}

inline at::Tensor to_device_of(const torch::nn::Module& module, const at::Tensor& tensor) {
  return tensor.to(module.parameters().front().device());
}

/// Draws every parameter anew from a generator of its own: ranks that are threads share libtorch's default one.
inline void draw_weights(torch::nn::Module& module) {
  const torch::NoGradGuard no_grad;
  at::Generator generator = at::detail::createCPUGenerator(5);
  for (at::Tensor& parameter : module.parameters())
    parameter.copy_(at::randn(parameter.sizes(), generator) * (parameter.dim() > 1 ? 0.3 : 0.1) +
                    (parameter.dim() > 1 ? 0 : 0.5));
}

struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    layers = register_module(
        "layers", torch::nn::Sequential(torch::nn::Linear(9, 17), torch::nn::Tanh(), torch::nn::Linear(17, 15),
                                        torch::nn::Tanh(), torch::nn::Linear(15, 3)));
    draw_weights(*this);
  }
  at::Tensor forward(const at::Tensor& input) { return layers->forward(input); }
  torch::nn::Sequential layers{nullptr};
};
TORCH_MODULE(Mlp);

struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    // A bias in front of a BatchNorm has a gradient of pure rounding noise, which Adam would blow up to whole steps.
    conv = register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(2, 5, 3).bias(false)));
    norm = register_module("norm", torch::nn::BatchNorm2d(5));
    head = register_module("head", torch::nn::Linear(5 * 4 * 4, 3));
    draw_weights(*this);
  }
  at::Tensor forward(const at::Tensor& input) {
    return head->forward(torch::relu(norm->forward(conv->forward(input))).flatten(1));
  }
  torch::nn::Conv2d conv{nullptr};
  torch::nn::BatchNorm2d norm{nullptr};
  torch::nn::Linear head{nullptr};
};

/// The embedding is the output projection too; `twice` runs twice; `unused` never, `rare` only in every fourth round.
struct TiedNetImpl : torch::nn::Module {
  TiedNetImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(11, 8));
    unused = register_module("unused", torch::nn::Linear(8, 8));
    twice = register_module("twice", torch::nn::Linear(8, 8));
    rare = register_module("rare", torch::nn::Linear(8, 8));
    frozen = register_module("frozen", torch::nn::Linear(8, 8));
    projection = register_parameter("projection", embedding->weight);
    draw_weights(*this);
    for (at::Tensor& parameter : frozen->parameters()) parameter.set_requires_grad(false);
  }
  at::Tensor forward(const at::Tensor& tokens, const MicroBatch& batch) {
    at::Tensor x = torch::tanh(twice->forward(embedding->forward(tokens)));
    x = torch::tanh(twice->forward(x)) + frozen->forward(x);
    if (batch.round % 4 == 0) x = x + rare->forward(x);
    return torch::matmul(x, projection.t());
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear unused{nullptr}, twice{nullptr}, rare{nullptr}, frozen{nullptr};
  at::Tensor projection;
};

inline TrainedModel make_mlp() {
  auto net = std::make_shared<MlpImpl>();
  return {net, [net](const MicroBatch& batch) {
            const at::Tensor input = input_of(*net, batch, {4, 9});
            return torch::mse_loss(net->forward(input).to(at::kFloat), input.narrow(1, 0, 3).to(at::kFloat));
          }};
}

inline TrainedModel make_conv_net() {
  auto net = std::make_shared<ConvNetImpl>();
  return {net, [net](const MicroBatch& batch) {
            const at::Tensor output = net->forward(input_of(*net, batch, {4, 2, 6, 6}));
            return torch::nn::functional::cross_entropy(output.to(at::kFloat),
                                                        to_device_of(*net, tokens_of(batch, 3, {4})));
          }};
}

inline TrainedModel make_tied_net() {
  auto net = std::make_shared<TiedNetImpl>();
  return {net, [net](const MicroBatch& batch) {
            const at::Tensor tokens = to_device_of(*net, tokens_of(batch, 11, {6}));
            return torch::nn::functional::cross_entropy(net->forward(tokens, batch).to(at::kFloat), tokens.flip(0));
          }};
}

}  // namespace trireme::testing
