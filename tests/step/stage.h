// A part of a model, trained by a TrainStep without a module and without a loss.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones.h>
#include <torch/csrc/autograd/variable.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "trireme/optim/options.h"
#include "trireme/step/train_step.h"

namespace trireme::testing {

inline std::unique_ptr<ShardedOptimizer> sgd(Pager& pager, Group& data, double lr) {
  const OptimizerOptions options{.kind = OptimizerKind::kSgd, .lr = lr};
  return std::make_unique<ShardedOptimizer>(pager, data, group_parameters(options, {}, pager.parameters()));
}

struct Stage {
  /// `count` weights of one element, all 1, each a unit; SGD with learning rate 1.
  Stage(Group& data, Group& model, int count, TrainStepOptions options = {}, const LrScheduleOptions& schedule = {},
        c10::Device device = c10::kCPU)
      : weights(make_weights(count, device)),
        pager(data, named(weights), {.units = {.merge_below_bytes = 0}}),
        buffers(data, device, [] { return std::vector<NamedBuffer>(); }),
        step({.shards = data,
              .model = model,
              .place = {data.rank(), data.size()},
              .pager = pager,
              .buffers = buffers,
              .optimizer = sgd(pager, data, 1),
              .hyperparameters = Hyperparameters({{.kind = OptimizerKind::kSgd, .lr = 1}}, schedule)},
             std::move(options)) {}

  /// Every weight's gradient becomes `gradient`.
  void backward(double gradient) {
    torch::autograd::edge_list outputs;
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& weight : weights) {
      const at::Tensor output = step.scale(2 * weight);
      outputs.push_back(torch::autograd::impl::gradient_edge(output));
      gradients.push_back(at::full_like(output, gradient / 2));
    }
    step.backward_from(outputs, gradients, {});
  }

  static std::vector<at::Tensor> make_weights(int count, c10::Device device) {
    std::vector<at::Tensor> weights;
    for (int i = 0; i < count; ++i)
      weights.push_back(at::ones({1}, at::TensorOptions().device(device)).requires_grad_());
    return weights;
  }
  static std::vector<NamedParameter> named(const std::vector<at::Tensor>& weights) {
    std::vector<NamedParameter> named;
    for (const at::Tensor& weight : weights) named.push_back({"w" + std::to_string(named.size()) + ".weight", weight});
    return named;
  }
  double value(size_t index = 0) const { return weights[index].detach().cpu().item<float>(); }

  std::vector<at::Tensor> weights;
  Pager pager;
  Buffers buffers;
  TrainStep step;
};

}  // namespace trireme::testing
