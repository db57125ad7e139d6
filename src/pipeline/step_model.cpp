#include "trireme/pipeline/step_model.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme::smp {
namespace {

/// Whether the tensor `name` is in `module`, or is it.
bool is_in(const std::string& name, const std::string& module) {
  return module.empty() || name == module || name.starts_with(module + ".");
}

Topology topology_of(Group& world, const torch::nn::Module& model, const Partition& partition) {
  partition.require_part_of(model);
  const int stages = partition.stages();
  if (world.size() % stages != 0)
    throw ConfigError(str("the partition has stages 0 to ", stages - 1, ", and ", world.size(),
                          " ranks are no multiple of ", stages, "; start a multiple, or set other stages"));
  return Topology({{"pipe", stages}, {"data", world.size() / stages}});
}

}  // namespace

int Partition::operator()(const std::string& tensor) const {
  const std::pair<const std::string, int>* innermost = nullptr;
  for (const auto& one : stages_)
    if (is_in(tensor, one.first) && (innermost == nullptr || one.first.size() >= innermost->first.size()))
      innermost = &one;
  return innermost != nullptr ? innermost->second : default_stage_;
}

int Partition::stages() const {
  int greatest = default_stage_;
  for (const auto& [module, stage] : stages_) greatest = std::max(greatest, stage);
  return greatest + 1;
}

void Partition::require_part_of(const torch::nn::Module& model) const {
  std::vector<std::string> names = model.named_parameters().keys();
  const std::vector<std::string> buffers = model.named_buffers().keys();
  names.insert(names.end(), buffers.begin(), buffers.end());
  for (const auto& [module, stage] : stages_)
    if (std::ranges::none_of(names, [&](const std::string& name) { return is_in(name, module); }))
      throw ConfigError(str("set_partition('", module, "', ", stage, "): the model has no parameter or buffer there"));
}

at::Tensor StepOutput::reduce_sum() const {
  at::Tensor sum = outputs_.front();
  for (size_t m = 1; m < outputs_.size(); ++m) sum = sum + outputs_[m];
  return sum;
}

at::Tensor StepOutput::reduce_mean() const { return reduce_sum() / static_cast<double>(outputs_.size()); }
at::Tensor StepOutput::concat(int64_t dim) const { return at::cat(outputs_, dim); }
at::Tensor StepOutput::stack(int64_t dim) const { return at::stack(outputs_, dim); }

DistributedModel::DistributedModel(Group& world, torch::nn::Module& model, const Partition& partition,
                                   const InitializeOptions& options, const StepRunnerOptions& step)
    : StepEngine(world, topology_of(world, model, partition), model, partition, step, options) {}

std::vector<StepOutput> DistributedModel::step(const std::vector<at::Tensor>& inputs, const Function& function) {
  const int64_t micro_batches = gradient_accumulation_steps();
  for (size_t i = 0; i < inputs.size(); ++i)
    if (inputs[i].dim() == 0 || inputs[i].size(0) % micro_batches != 0)
      throw ShapeError(str("step: input ", i, " of sizes ", inputs[i].sizes(), " cannot be cut along dim 0 into ",
                           micro_batches, " micro-batches (gradient_accumulation_steps)"));
  const auto results = StepEngine::step(static_cast<int>(micro_batches), [&](int micro_batch) {
    std::vector<at::Tensor> parts;
    for (const at::Tensor& input : inputs) {
      const int64_t size = input.size(0) / micro_batches;
      parts.push_back(input.narrow(0, micro_batch * size, size));
    }
    return function(parts);
  });
  std::vector<StepOutput> outputs;
  for (size_t i = 0; i < results.front().size(); ++i) {
    std::vector<at::Tensor> of_micro_batches;
    for (const std::vector<at::Tensor>& result : results) {
      if (result.size() != results.front().size())
        throw ShapeError(str("step: the function returned ", results.front().size(), " tensors in micro-batch 0 and ",
                             result.size(), " in another one; return as many in each"));
      of_micro_batches.push_back(result[i]);
    }
    outputs.emplace_back(std::move(of_micro_batches));
  }
  return outputs;
}

}  // namespace trireme::smp
