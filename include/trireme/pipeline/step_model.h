// SageMaker's names for a step function, in C++: what a program marks, calls and gets back.
//
//   smp::Partition partition;
//   partition.set_partition("decoder", 1);  // all else is on stage 0
//   smp::DistributedModel model(world, *net, partition, {.config = "ds_config.json"});
//   for (auto& batch : loader) {
//     const auto outputs = model.step({batch.x, batch.y}, [&](const std::vector<at::Tensor>& part) {
//       const at::Tensor loss = torch::mse_loss(net->forward(part[0]), part[1]);
//       model.backward(loss);
//       return std::vector{loss};
//     });
//     model.update();
//     log(outputs[0].reduce_mean());
//   }
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "trireme/comm/world.h"
#include "trireme/pipeline/step_engine.h"

namespace trireme::smp {

/// Which stage has which module.
class Partition {
 public:
  /// `default_stage`: of modules that are not set.
  explicit Partition(int default_stage = 0) : default_stage_(default_stage) {}
  /// `module` ("encoder.layers.3", or the name of a tensor) and all in it is on `stage`; the innermost one that is set
  /// counts.
  void set_partition(const std::string& module, int stage) { stages_[module] = stage; }
  /// The stage of a parameter or buffer.
  int operator()(const std::string& tensor) const;
  /// The number of stages, up to the greatest that is set.
  int stages() const;
  /// Throws    ConfigError: a module of which `model` has no tensor.
  void require_part_of(const torch::nn::Module& model) const;

 private:
  const int default_stage_;
  std::map<std::string, int> stages_;
};

/// The tensors that a step function returned at one place, by micro-batch: detached, and alike on all stages.
class StepOutput {
 public:
  explicit StepOutput(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {}
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  /// The sum, in the order of micro-batches, and that divided once.
  at::Tensor reduce_sum() const;
  at::Tensor reduce_mean() const;
  at::Tensor concat(int64_t dim = 0) const;
  at::Tensor stack(int64_t dim = 0) const;

 private:
  std::vector<at::Tensor> outputs_;
};

/// A StepEngine whose ranks are `partition`'s stages, each as often as the world's size allows, and which cuts a batch
/// into as many micro-batches as the configuration has gradient_accumulation_steps.
class DistributedModel : public StepEngine {
 public:
  /// Collective. `world` and `model` outlive this.
  /// Throws    ConfigError: the stages do not divide the ranks; a module in `partition` that there is not; as
  ///           StepEngine's.
  DistributedModel(Group& world, torch::nn::Module& model, const Partition& partition,
                   const InitializeOptions& options = {}, const StepRunnerOptions& step = {});
  DistributedModel(World& world, torch::nn::Module& model, const Partition& partition,
                   const InitializeOptions& options = {}, const StepRunnerOptions& step = {})
      : DistributedModel(*world.group, model, partition, options, step) {}

  /// The step function of one micro-batch, over its part of the inputs.
  using Function = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;
  /// One step over `inputs`, which are the same on all stages of a pipeline; each is cut along its first dim.
  /// Throws    ShapeError: a first dim that the micro-batches do not divide. As StepRunner::run().
  std::vector<StepOutput> step(const std::vector<at::Tensor>& inputs, const Function& function);
  using StepEngine::step;
};

}  // namespace trireme::smp
